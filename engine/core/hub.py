"""The hub of models and datasets: the commit that a name means now, and what stands in the way."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from engine.core.types import Log, no_log

# What "model owner/name revision" means: asked once, and on rank 0 alone, whose answers others get
COMMITS: dict[str, str | None] = {}
BEGAN: dict[str, str] = {}  # the COMMITS with which the run began that goes on
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
LOG_IN = "run `hf auth login` or set HF_TOKEN"


def is_commit(revision: object) -> bool:
    return re.fullmatch("[0-9a-f]{40}", str(revision)) is not None


def commit_of(
    name: str, revision: str | None, *, kind: str = "model", log: Log = no_log
) -> str | None:
    """The commit that a branch, a tag or None (main) means on the hub; of a folder the revision.

    `kind` is "model" or "dataset". A run keeps the commit that it began with, and says where a
    revision that is given means another one now. If the hub does not answer, the cache's commit is
    used, which is logged, and this process asks the hub no more. OSError, in one line with the fix,
    if the cache lacks a model too; None for a dataset, which `datasets` may have in its own cache.
    """
    if Path(name).exists() or name.count("/") > 1:  # a folder, which may be gone
        return revision
    key = f"{kind} {name} {revision}"
    if key not in COMMITS:
        began = BEGAN.get(key)
        asked = began if began and is_offline_mode() else revision or began
        commit = find_commit(kind, name, asked, log)
        if began not in (None, commit):
            log(
                f"{name}: {revision} is now commit {commit}, this run goes on with its own, {began}"
            )
        COMMITS[key] = commit = began or commit
        COMMITS[f"{kind} {name} {commit}"] = commit
    return COMMITS[key]


def find_commit(kind: str, name: str, revision: str | None, log: Log) -> str | None:
    problem = "HF_HUB_OFFLINE is set"
    try:
        cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind))
        file = cache / "refs" / (revision or "main")
        if not is_offline_mode():
            commit = ask_hub(kind, name, revision, log)
            if commit != revision:
                with suppress(OSError):  # a cache that cannot be written, which serves all the same
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(str(commit))  # for a start without the hub
            return commit
    except ValueError:  # it is no id of the hub, which loading says better
        return revision
    except Exception as error:  # of the HTTP client, which has another name in each version
        problem = problem_of(error, name, revision)
        constants.HF_HUB_OFFLINE = status_of(error) >= 500
    commit = file.read_text() if file.is_file() else revision
    if commit and (cache / "snapshots" / commit).is_dir():
        log(f"{problem}: {name} is taken from the cache, at commit {commit}")
        return commit
    if kind == "dataset" and is_offline_mode():
        log(problem)
        return revision
    if is_offline_mode():
        problem += f"; the cache {constants.HF_HUB_CACHE} has no {name} at {revision or 'main'}"
    raise OSError(problem)


def ask_hub(kind: str, name: str, revision: str | None, log: Log) -> str | None:
    """The commit, as a request for a file tells it; bad luck with it is followed by another."""
    url = hf_hub_url(name, "config.json", revision=revision, repo_type=kind)
    how = {"timeout": constants.HF_HUB_ETAG_TIMEOUT}
    for is_last in (False, True):
        try:
            return get_hf_file_metadata(url, **how).commit_hash
        except errors.RemoteEntryNotFoundError as error:  # an adapter or a dataset has no such file
            return error.response.headers.get("X-Repo-Commit")
        except Exception as error:
            if is_last or (status_of(error) < 500 and status_of(error) != 429):
                raise
            log(f"{problem_of(error, name, revision)}: it is asked again")
            how["retry_on_errors"] = status_of(error) == 429  # six times, in 24 s


def status_of(error: Exception) -> int:
    """The status that the hub answered with; 503 if it did not answer."""
    return error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 503


def problem_of(error: Exception, name: str, revision: str | None) -> str:
    """What stands in the way, and what to do."""
    match error:
        case errors.GatedRepoError():
            return f"{name} is gated: ask for access at {constants.ENDPOINT}/{name}, then {LOG_IN}"
        case errors.RepositoryNotFoundError():
            return f"the hub has no {name} for you: correct the name or, if it is private, {LOG_IN}"
        case errors.RevisionNotFoundError():
            return f"{name} has no branch, tag or commit {revision}: correct it"
    if status_of(error) == 401:
        return f"the hub refuses your token, which spoils public models too: {LOG_IN}, or remove it"
    if status_of(error) == 429:
        return f"{constants.ENDPOINT} is busy (429, too many requests)"
    return f"{constants.ENDPOINT} cannot be reached: {' '.join(str(error).split())}"


def fetch_weights(name: str, commit: str | None, log: Log) -> None:
    """Say what is fetched, and fetch it with the client's bar, unless the cache has the weights."""
    if Path(name).exists() or is_offline_mode():
        return
    if any(isinstance(try_to_load_from_cache(name, w, revision=commit), str) for w in WEIGHTS):
        return
    found = []
    size = ""
    with suppress(errors.HfHubHTTPError):  # a mirror may not tell; then loading fetches them
        found = [
            file
            for file in HfApi().list_repo_tree(name, revision=commit)
            if fnmatch(file.path, "model*.safetensors")
        ]
        size = f", {sum(file.size for file in found) / 1e6:,.1f} MB,"
    log(f"fetching {name}{size} into {constants.HF_HUB_CACHE}")
    enable_progress_bars()
    for file in found:
        hf_hub_download(name, file.path, revision=commit)
    disable_progress_bars()


@contextmanager
def without_hub() -> Iterator[None]:
    """Ask the hub for nothing: peft, which saves an adapter, would read the base's main."""
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings(action="ignore"):  # peft says that it could not
            yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
