"""Whether the hub of models and datasets can be reached."""

import functools
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError


@functools.cache
def reach_hub(name: str, revision: str | None, *, kind: str = "model") -> str | None:
    """Let the run read the hub's cache alone if the hub cannot be reached for what is no folder.

    The hub is tried once: its own client asks six times for each file, in 24 s. `kind` is "model"
    or "dataset". Returns why, if so; OSError if the cache lacks the model.
    """
    if Path(name).exists() or huggingface_hub.is_offline_mode():
        return None
    try:
        url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision, repo_type=kind)
        huggingface_hub.get_hf_file_metadata(url, timeout=10)
    except ValueError:  # it is no id of the hub, which loading says better
        return None
    except Exception as error:  # the HTTP client's, which has another name in each version
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return None  # the hub was reached
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        files = ("config.json", "adapter_config.json")
        cached = functools.partial(huggingface_hub.try_to_load_from_cache, name, revision=revision)
        problem = f"{huggingface_hub.constants.ENDPOINT} cannot be reached: {error}"
        if kind == "model" and not any(isinstance(cached(file), str) for file in files):
            raise OSError(f"{problem}; the cache lacks the model") from error
        return problem
