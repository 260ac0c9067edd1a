"""Where a run's metrics go besides its own files: what logging.report_to names.

A board has a title, the environment variable that has its server's address, and the methods of
MlflowRun: see there, and WandbRun, for what another one needs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.config import LoggingSettings
from engine.core.files import load_env
from engine.core.packages import import_package
from logger import SLOW_S, MlflowRun, is_evaluation


class WandbRun:
    """The run in Weights & Biases. Any of its methods may raise or take long; see `Logger._send`.

    Rows carry their `step`, which is the axis of all curves: wandb's own counter would refuse the
    evaluation of a step that it has seen. Where wandb is offline, its files lie in the run's
    folder, and a resumed run sends again what the killed one has sent: nobody can tell it.
    """

    title, server = "wandb", "WANDB_BASE_URL"

    def __init__(self) -> None:
        load_env()
        self.wandb = import_package("wandb", key="logging.report_to")
        self.last_sent = (-1, False)

    def start(self, run_id: str | None, folder: Path, about: dict[str, Any]) -> tuple[str, str]:
        """Continue the run of that id, or create one; returns its id and address."""
        settings = self.wandb.Settings(
            silent=True,
            console="off",  # it would take over stdout
            disable_code=True,
            disable_git=True,  # a remote's address may have a password
            x_disable_meta=True,  # so may the command line
            init_timeout=SLOW_S,
            finish_timeout=SLOW_S,
            finish_timeout_raises=True,
        )
        is_online = self.wandb.setup(settings).settings.mode == "online"
        if is_online and not self.wandb.login(prompt=False):  # init would ask for it, and wait
            raise ValueError("no API key: run `wandb login`, or set WANDB_MODE=offline")
        self.run = self.wandb.init(
            project=about["experiment"],
            name=about["run_name"],
            notes=about["description"],
            config=about["params"],
            dir=folder,
            id=run_id,
            resume="allow",
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")
        step, evaluated = self.run.summary.get("last_sent") or (-1, False)
        self.last_sent = (step, evaluated)
        sync_folder = Path(self.run.dir).parent
        return self.run.id, self.run.url if is_online else f"offline, wandb sync {sync_folder}"

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step} | metrics)
        self.run.summary["last_sent"] = [step, is_evaluation(metrics)]

    def log_samples(self, table: dict[str, list]) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        samples = self.wandb.Table(columns=[*table], data=rows, allow_mixed_types=True)
        self.run.log({"step": table["step"][0], "samples": samples})

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "FINISHED"))
        self.wandb.teardown()  # waits for its process, which writes the last rows


BOARDS = {"mlflow": MlflowRun, "wandb": WandbRun}


def make_boards(logging: LoggingSettings) -> Iterator[MlflowRun | WandbRun]:
    """Raises ValueError with the command that installs a package, where one is missing."""
    for name, board in BOARDS.items():
        if name in logging.report_to or (name == "mlflow" and logging.mlflow):
            yield board()
