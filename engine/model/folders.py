"""What lies at a model's path, looked at before torch: this imports no heavy library."""

import difflib
import hashlib
from pathlib import Path

# In a model's folder: what decides on its prompts, its tokens and its arithmetic.
FILES = ("*config.json", "*token*", "vocab*", "merges*", "chat_template*", "*.model", "*.py")
WEIGHTS = ("*.safetensors", "*.bin")
FILES_OF_BASE = "files-"  # and their hash: the revision, for an adapter, of a base in a folder
BLOCK = 16_384  # bytes
NUM_BLOCKS = 1_024  # of each weight file, spread evenly over it


def check_folder(name: str) -> None:
    """Raise ValueError if `name` is a path, not a hub id, and there is no model at it."""
    path = Path(name)
    if not path.exists():
        if is_path(name) or ("/" in name and path.parent.is_dir()):
            raise ValueError(no_such_folder(name))
        return
    if not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        if (path / "best").is_dir():
            raise ValueError(f"it is the folder of a run; its best model is {path / 'best'}")
        raise ValueError("it is no folder with a config.json, so no model")
    for file in path.iterdir():
        is_small = file.is_file() and file.stat().st_size < 1_000
        if is_small and file.read_bytes().startswith(b"version https://git-lfs"):
            raise ValueError(f"{file.name} is only a pointer; fetch the file with `git lfs pull`")


def is_path(name: str) -> bool:
    """Whether it is no id of the hub, whatever lies there."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def no_such_folder(name: str) -> str:
    """The error for a path where there is nothing; it names the existing folder nearest to it."""
    path = Path(name).absolute()
    there = next(filter(Path.is_dir, path.parents))
    names = [folder.name for folder in there.iterdir() if folder.is_dir()]
    close = difflib.get_close_matches(path.relative_to(there).parts[0], names, n=1)
    return f"no such folder in {there}" + (f", the nearest is {there / close[0]}" if close else "")


def hash_of_folder(folder: Path, *, with_weights: bool) -> str:
    """A hash of a model's files, and of blocks of its weights: training changes them everywhere."""
    patterns = FILES + WEIGHTS * with_weights
    digest = hashlib.sha256()
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}: {size} bytes".encode())
        stride = max(BLOCK, size // NUM_BLOCKS) if f"*{file.suffix}" in WEIGHTS else BLOCK
        with file.open("rb", buffering=0) as opened:
            for start in range(0, size, stride):
                opened.seek(start)
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()[:16]


def version_of(base: Path) -> str:
    """What stands in an adapter's config as the revision of its base's folder."""
    return FILES_OF_BASE + hash_of_folder(base, with_weights=True)
