"""Where the processes of one run write: a folder a run, a private file a process. Secrets never go there: nobody logs a config or a Redis url."""

import faulthandler
import logging
import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

_KEEP = 5


def new_log_folder(cache_dir: Path, cluster: str) -> Path:
    """A fresh folder below `cache_dir`/logs; of the older ones of this cluster the newest few stay."""
    parent = cache_dir / "logs"
    parent.mkdir(parents=True, exist_ok=True)
    older = sorted(parent.glob(f"{cluster}-[0-9]*"))
    for folder in older[: max(0, len(older) - _KEEP + 1)]:
        shutil.rmtree(folder, ignore_errors=True)
    folder = parent / f"{cluster}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def open_log(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def log_to(path: str, level: str) -> None:
    """Everything that this process writes, crashes of native code included, into one private file."""
    with open_log(Path(path)) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    faulthandler.enable(2)
