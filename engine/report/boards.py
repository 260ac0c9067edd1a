"""Where a run's metrics go besides its own files: what logging.report_to names.

A board has a title, the environment variable that has its server's address, and the methods of
MlflowRun: see there, and WandbRun, for what another one needs.
"""

from collections.abc import Iterator

from engine.core.config import LoggingSettings
from engine.report.wandb_run import WandbRun
from logger import MlflowRun

BOARDS = {"mlflow": MlflowRun, "wandb": WandbRun}


def make_boards(logging: LoggingSettings) -> Iterator[MlflowRun | WandbRun]:
    """Raises ValueError with the command that installs a package, where one is missing."""
    for name, board in BOARDS.items():
        if name in logging.report_to or (name == "mlflow" and logging.mlflow):
            yield board()
