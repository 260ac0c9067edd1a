"""Where a run's metrics go besides its own files: MLflow and wandb.

Another board is a subclass of `Board` with the attributes and the four methods that MlflowRun and
WandbRun have, which may raise or take long, and a name in BOARDS for logging.report_to. Its `start`
continues the run of an id, or creates one, and returns its id and address.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from engine.core.files import write_atomically
from engine.core.packages import import_package
from engine.core.text import unnest
from engine.core.types import Metrics

# When a server does not answer, MLflow by default tries 8 times for 120 s, and sleeps as long as a
# Retry-After header asks for. These are for what neither the environment nor .env sets.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else it prints two lines about a new database
}
SLOW_S = 20.0  # all ranks wait for rank 0; two slower calls in a row are a failure
PAUSE = 20  # times what a failed call has taken: to try again costs a run at most 5%


class Board:
    """A run on a board: what its kinds share, and the guard that no call to a board can hurt a run.

    After a call that fails, or two slow ones in a row, there is a warning, and for a while no other
    call; then the board's run is begun again and gets the metrics that it has missed. The first may
    take long, since MLflow makes its database then. A resumed run repeats steps that it has sent
    before, and boards cannot delete points. So a board keeps what was `last_sent` to it, a step and
    whether its evaluation, and gets only what comes later.
    """

    title: str  # in lower case, its package
    server: str  # the environment variable that has its server's address
    environment: ClassVar[dict[str, str]] = {}
    last_sent = (-1, False)
    is_on = False  # from `open` on, but for the while after a failure, until the run ends
    next_try_s = 0.0
    was_slow = False  # the last call, but for the first

    def __init__(self) -> None:
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        self.package = import_package(self.title.lower(), key="logging.report_to")

    def open(self, folder: Path, about: dict, logger: Any) -> None:
        """Begin the board's run, or go on with the one whose id is in the folder; print where."""
        self.folder = folder
        self.about = about | {"params": unnest(about["params"])}
        self.logger = logger
        self.unsent = []  # moments and metrics
        self.is_on = True
        self._begin()

    def _begin(self) -> None:
        with self._guard():
            file = self.folder / f"{self.title.lower()}_run_id"
            known = file.read_text().strip() if file.exists() else None
            run_id, address = self.start(known, self.folder, self.about)
            write_atomically(file, run_id + "\n")
            self.logger.info(f"{self.title}: {address}")
            self.is_on = True
        self.was_slow = False

    def log_metrics(self, moment: tuple[int, bool], metrics: Metrics) -> None:
        """Send what was missed and metrics of a step or, where `moment` says so, its evaluation."""
        self.unsent.append((moment, metrics))
        if not self.is_on and time.monotonic() > self.next_try_s:
            self._begin()
        while self.is_on and self.unsent:
            moment, metrics = self.unsent[0]
            with self._guard():
                if moment > self.last_sent:  # boards would draw infinity as 1.8e308
                    finite = {n: value for n, value in metrics.items() if math.isfinite(value)}
                    self.send_metrics(*moment, finite)
                del self.unsent[0]

    def log_samples(self, moment: tuple[int, bool], samples: list[dict]) -> None:
        if self.is_on and moment > self.last_sent:
            rows = [unnest(sample, "/") for sample in samples]
            names = dict.fromkeys(name for row in rows for name in row)
            with self._guard():
                self.send_samples({name: [row.get(name) for row in rows] for name in names})

    def close(self, status: str) -> None:
        if self.is_on:
            with self._guard():
                self.finish(status)
        self.is_on = False

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Leave the board alone for a while where a call fails or two in a row are slow."""
        started_s = time.monotonic()
        try:
            yield
            is_slow = time.monotonic() - started_s > SLOW_S
            if is_slow and self.was_slow:
                raise TimeoutError(f"two calls in a row took over {SLOW_S:.0f} s each")
            self.was_slow = is_slow
        except Exception as error:  # nothing that a board does may end a training run
            self.next_try_s = time.monotonic() + PAUSE * (time.monotonic() - started_s)
            reason = str(error).rpartition("(Caused by ")[2].split("\n")[0]
            if "@" in os.getenv(self.server, ""):  # the reason may quote the password
                reason = type(error).__name__
            if self.is_on:  # else it has been said
                self.logger.warning(
                    f"{self.title} is away and gets its metrics later, the run's own files go on: "
                    f"{reason[:300]}"
                )
            self.is_on = False


class MlflowRun(Board):
    """The run in MLflow, where `eval/pass@1` is `eval/pass_at_1`: it refuses some characters."""

    title = "MLflow"
    server = "MLFLOW_TRACKING_URI"
    environment = MLFLOW_ENVIRONMENT

    def start(self, run_id: str | None, folder: Path, about: dict) -> tuple[str, str]:
        self.client = self.package.MlflowClient()
        if run_id:
            run = self.client.get_run(run_id)
            step, _, evaluated = run.data.tags.get("last_sent", "-1").partition(" ")
            self.last_sent = (int(step), evaluated != "")
            self.client.update_run(run_id, status="RUNNING")
        else:
            run = self.client.create_run(
                self.package.set_experiment(about["experiment"]).experiment_id,
                run_name=about["run_name"],
                tags={"mlflow.note.content": about["description"]},  # Markdown
            )
            run_id = run.info.run_id
            self.package.log_params(
                {mlflow_name(name): value for name, value in about["params"].items()},
                synchronous=True,
                run_id=run_id,
            )
            self.client.log_text(run_id, about["config_text"], "config.yaml")
        server = re.sub("//.*@", "//", self.package.get_tracking_uri()).rstrip("/")  # no password
        page = f"#/experiments/{run.info.experiment_id}/runs/{run_id}"
        self.run_id = run_id
        return run_id, f"{server}/{page}" if "http" in server else f"{run_id} in {server}"

    def send_metrics(self, step: int, is_evaluation: bool, metrics: Metrics) -> None:
        entities = self.package.entities
        now_ms = int(time.time() * 1000)
        points = [
            entities.Metric(mlflow_name(name), value, now_ms, step)
            for name, value in metrics.items()
        ]
        tags = [entities.RunTag("last_sent", f"{step} evaluated" if is_evaluation else str(step))]
        self.client.log_batch(self.run_id, metrics=points, tags=tags, synchronous=True)

    def send_samples(self, table: dict[str, list]) -> None:
        self.client.log_table(self.run_id, table, "samples.json")  # adds to the earlier steps' rows

    def finish(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


def mlflow_name(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


class WandbRun(Board):
    """The run in Weights & Biases. Rows carry their `step`, by which all curves are drawn.

    wandb's own counter would refuse the evaluation of a step that it has seen. Where wandb is
    offline a resumed run sends again what the killed one has sent: nobody can tell it.
    """

    title = "wandb"
    server = "WANDB_BASE_URL"

    def start(self, run_id: str | None, folder: Path, about: dict) -> tuple[str, str]:
        settings = self.package.Settings(
            silent=True,
            console="off",  # it would take over stdout
            disable_code=True,
            disable_git=True,  # a remote's address may have a password
            x_disable_meta=True,  # so may the command line
            init_timeout=SLOW_S,
            finish_timeout=SLOW_S,
            finish_timeout_raises=True,
        )
        is_online = self.package.setup(settings).settings.mode == "online"
        if is_online and not self.package.login(prompt=False):  # init would ask for it, and wait
            raise ValueError("no API key: run `wandb login`, or set WANDB_MODE=offline")
        self.run = self.package.init(
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
        self.last_sent = tuple(self.run.summary.get("last_sent") or (-1, False))
        sync_folder = Path(self.run.dir).parent
        return self.run.id, self.run.url if is_online else f"offline, wandb sync {sync_folder}"

    def send_metrics(self, step: int, is_evaluation: bool, metrics: Metrics) -> None:
        self.run.log({"step": step} | metrics)
        self.run.summary["last_sent"] = [step, is_evaluation]

    def send_samples(self, table: dict[str, list]) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        samples = self.package.Table(columns=[*table], data=rows, allow_mixed_types=True)
        self.run.log({"step": table["step"][0], "samples": samples})

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "FINISHED"))
        self.package.teardown()  # waits for its process, which writes the last rows


BOARDS = {"mlflow": MlflowRun, "wandb": WandbRun}
