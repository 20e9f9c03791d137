"""The built-in trackers. Each imports its library when it begins; docs/console.md says where the data go."""

import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.run import atomic
from holdfast.view.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes a file of events for each process in `tensorboard/` of the run directory.

    A file begins with the step after which it continues. Readers then drop later steps of the files before it: a killed
    process wrote these and did not note them."""

    takes_older_steps = True
    _FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d+\.\d+)\.")
    _LARGEST = (2 - 2**-23) * 2.0**127
    """The largest float32, in which TensorBoard stores every number."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin a new file after `after`; the first one if there is none: the files stay on their machine."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        names = (f"tensorboard.compat.proto.{name}_pb2" for name in ("event", "summary", "tensor", "types"))
        events, self._summaries, self._tensors, self._types = map(import_module, names)
        self._event, self._summary = events.Event, self._summaries.Summary
        directory = run.directory / "tensorboard" / f"history_{run.history}"
        if not directory.exists():
            after, self.begins_anew = 0, True
        atomic.make_directory(directory)
        # Readers sort by file name: the number is a time, but always after the other files, whatever the clock says.
        there = [float(match[1]) for path in directory.iterdir() if (match := self._FILE_NAME.match(path.name))]
        number = max([time.time(), *(earlier + 1e-3 for earlier in there)])
        name = f"events.out.tfevents.{number:020.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("xb")
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2", source_metadata=events.SourceMetadata(writer="holdfast"))
        self._write(step=after + 1, session_log=events.SessionLog(status=events.SessionLog.START))
        settings = "".join(f"    {key} = {value}\n" for key, value in run.settings.items())
        about = f"run {run.id}, attempt {run.attempt}\n\n{settings}"
        self._write_text(f"settings/attempt_{run.attempt}", about, step=after + 1)
        return after

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values that float32 can hold."""
        kept = {name: value for name, value in metrics.items() if abs(value) <= self._LARGEST}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in kept.items()]
        self._write(step=step, summary=self._summary(value=values))

    def log_answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write the table as text in Markdown, which the page shows as a table."""
        head = [*answers[0]]
        rows = [head, ["---"] * len(head), *([_markdown(value) for value in row.values()] for row in answers)]
        self._write_text("answers", "\n".join(f"| {' | '.join(row)} |" for row in rows), step=step)

    def _write_text(self, tag: str, text: str, *, step: int) -> None:
        value = self._summary.Value(
            tag=tag,
            metadata=self._summaries.SummaryMetadata(plugin_data={"plugin_name": "text"}),
            tensor=self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()]),
        )
        self._write(step=step, summary=self._summary(value=[value]))

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def _markdown(value: object) -> str:
    """Return a cell of a table in Markdown: in a line, with nothing that ends the cell."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return re.sub(r"([\\|`*_<>])", r"\\\1", text).replace("\n", "<br>")


class WandB(Tracker):
    """One run of W&B with the run's id, so that W&B resumes it.

    The service knows the last step that it has. Offline nobody knows, and a killed process loses what it wrote last.
    Each process then writes the files of the run again, from the first step, and removes the files before."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        import wandb

        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the makers of wandb
        # A service of another process would hold the run after this process is killed.
        os.environ.pop("WANDB_SERVICE", None)
        directory = Path(os.environ.get("WANDB_DIR") or run.directory / "tracking")
        atomic.make_directory(directory)
        settings = wandb.Settings(
            # This process does not compute anything.
            console="off", disable_git=True, save_code=False, disable_job_creation=True,
            x_disable_meta=True, x_disable_stats=True,
        )  # fmt: skip
        self._run = wandb.init(
            project=run.project, id=run.id, name=run.name, group=run.origin, tags=list(run.tags), resume="allow",
            dir=str(directory), settings=settings,
        )  # fmt: skip
        self._answers: dict[str, Any] = {}
        self._row: int | None = None  # the step that was logged last
        self._has_evaluation = False
        self._run.config.update({**run.settings, "attempt": run.attempt, "origin": run.origin}, allow_val_change=True)
        if not self._run.offline:
            return max(after if self._run.disabled else 0, self._run.step - 1)
        self.begins_anew = True
        for old in directory.glob(f"wandb/offline-run-*-{run.id}"):
            if not Path(self._run.dir).is_relative_to(old):
                shutil.rmtree(old)
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # In one call: W&B has the whole row or nothing of it.
        self._run.log({**metrics, **self._answers}, step=step)
        self._row, self._has_evaluation, self._answers = step, False, {}

    def log_answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Keep the table for the row of the step."""
        import wandb

        self._answers = {"answers": wandb.Table(columns=[*answers[0]], data=[[*row.values()] for row in answers])}

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Add it to the row of the last step, with its own as `eval/version`: W&B takes nothing at an older step.

        A row holds one evaluation. The summary takes the evaluations that are left at the end of the run."""
        if self._row is not None and not self._has_evaluation:
            self._run.log(dict(metrics), step=self._row)
            self._has_evaluation = True
            return True
        if is_last:
            self._run.summary.update({f"{name}/step_{step}": value for name, value in metrics.items()})
        return is_last

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        """Hand over an alert, which W&B sends by mail or to Slack."""
        where = f"{self._run.name or self._run.id}" + ("" if step is None else f", step {step}")
        # Titles have less than 64 characters. A wait of 0 would mean a minute, in which W&B drops alerts of one title.
        level = "WARN" if kind == "alert" else "INFO"
        self._run.alert(f"{kind} in {where}"[:63], text, level=level, wait_duration=0.001)

    def flush(self) -> None:
        """Do nothing: a process asks the service at its beginning what has arrived."""

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """One run of an experiment of MLflow, found by a tag.

    MLflow takes nothing back, and a step may have arrived in part: each process asks for the last step of each metric,
    and sends only later ones."""

    takes_older_steps = True
    _RUN_TAG = "holdfast.run_id"
    _NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
    _MAX_METRICS, _MAX_PARAMS, _MAX_CHARACTERS = 1000, 100, 500

    def begin(self, run: TrackedRun, *, after: int) -> int:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import
        import mlflow
        from mlflow.entities import Metric, Param, RunTag

        with _only_process(mlflow.get_tracking_uri()):
            self._client = mlflow.MlflowClient()
            experiment = mlflow.set_experiment(run.project).experiment_id  # which creates it
        self._metric, self._metrics = Metric, list[Any]()
        there = self._client.search_runs([experiment], f"tags.`{self._RUN_TAG}` = '{run.id}'")
        origin = {"holdfast.origin": run.origin} if run.origin else {}
        found = (
            there[0]
            if there
            else self._client.create_run(experiment, tags={self._RUN_TAG: run.id, **origin}, run_name=run.name)
        )
        self._id = found.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._last_steps = {metric.key: metric.step for metric in found.data._metric_objs}
        params = {_mlflow_name(key): str(value)[: self._MAX_CHARACTERS] for key, value in run.settings.items()}
        # A parameter keeps its first value: tags hold what a later attempt has changed.
        for part in _parts([one for one in params.items() if one[0] not in found.data.params], self._MAX_PARAMS):
            self._client.log_batch(self._id, params=[Param(*one) for one in part])
        before = found.data.params | {key: value for key, value in found.data.tags.items() if key in params}
        changed = {key: value for key, value in params.items() if before.get(key, value) != value}
        tags = dict.fromkeys(run.tags, "true") | changed | {"holdfast.attempt": str(run.attempt)}
        self._client.log_batch(self._id, tags=[RunTag(*one) for one in tags.items()])
        return max(min(after, max(self._last_steps.values(), default=0)), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the step until `flush`, or until a request is full."""
        now_ms = int(time.time() * 1000)
        named = [(_mlflow_name(key), value) for key, value in metrics.items()]
        self._metrics += [
            self._metric(name, value, now_ms, step) for name, value in named if self._last_steps.get(name, -1) < step
        ]
        if len(self._metrics) >= self._MAX_METRICS:
            self.flush()

    def log_answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Store a file of the step, in the format of MLflow's tables; the same again if the step is sent again."""
        table = {"columns": [*answers[0]], "data": [[*row.values()] for row in answers]}
        self._client.log_dict(self._id, table, f"answers/step_{step}.json")

    def flush(self) -> None:
        for part in _parts(self._metrics, self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=part)
        self._metrics.clear()

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)


@contextmanager
def _only_process(uri: str) -> Iterator[None]:
    """Keep other runs from creating or changing the tables of an SQLite file meanwhile: MLflow takes no lock."""
    from sqlalchemy import make_url

    url = make_url(uri) if uri.startswith("sqlite") else None
    if url is None or not url.database or url.database == ":memory:":
        yield
        return
    directory = os.open(Path(url.database).absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network filesystems lock no directories: the sender tries again
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _mlflow_name(key: str) -> str:
    """Return a name that MLflow takes: `eval/sort/avg:4`."""
    return MLflow._NOT_ALLOWED.sub(lambda match: ":" if match[0] == "@" else "_", key)


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))


class Trackio(Tracker):
    """One run of Trackio. Its name ends with the id of the run: Trackio resumes by name."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin or resume the run; its database knows the last step, as Trackio writes in the background."""
        self._about = run
        self._open()
        return max(0, self._run._next_step - 1)

    def _open(self) -> None:
        import trackio

        run = self._about
        self._run = trackio.init(
            project=run.project, name=f"{run.name}-{run.id}", group=run.origin,
            config={**run.settings, "attempt": run.attempt, "tags": list(run.tags), "origin": run.origin},
            resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self._is_unsure = False  # an evaluation or alert is not in the database yet; only steps are asked for

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        self.log(step, metrics)
        self._is_unsure = True
        return True

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        from trackio import AlertLevel

        level = AlertLevel.WARN if kind == "alert" else AlertLevel.INFO
        self._run.alert(title=kind, text=text, level=level, step=step)
        self._is_unsure = True

    def flush(self) -> None:
        """Have evaluations and alerts written: only the end of a Trackio run waits for them."""
        if self._is_unsure:
            self._run.finish()
            self._open()

    def close(self) -> None:
        self._run.finish()


class Prometheus(Tracker):
    """Serves the last step at `/metrics`, on HOLDFAST_PROMETHEUS (127.0.0.1:9464), as gauges by the metric's name."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Listen, and ask for the last step again, to show it."""
        from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

        from holdfast.view.serve import Response, WebServer

        registry, names = CollectorRegistry(), ("run", "run_id")
        self._labels = (run.directory.name, run.id)
        self._value = Gauge("holdfast_metric", "Last value, see docs/metrics.md", [*names, "metric"], registry=registry)
        self._step = Gauge("holdfast_step", "Last step; a resume may lower it", names, registry=registry)
        self._time = Gauge("holdfast_step_timestamp_seconds", "When it was read", names, registry=registry)
        self._alarms = Counter("holdfast_alarms", "Alerts and warnings", [*names, "kind"], registry=registry)
        host, _, port = os.environ.get("HOLDFAST_PROMETHEUS", "127.0.0.1:9464").rpartition(":")

        def answer(path: str) -> Response:
            found = path == "/metrics"
            return Response(200, generate_latest(registry)) if found else Response(404, b"see /metrics\n")

        self._server = WebServer(host or "127.0.0.1", int(port), answer)
        return max(0, after - 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log_evaluation(step, metrics, is_last=False)
        self._step.labels(*self._labels).set(step)
        self._time.labels(*self._labels).set_to_current_time()

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        for name, value in metrics.items():
            self._value.labels(*self._labels, name).set(value)
        return True

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        self._alarms.labels(*self._labels, kind).inc()

    def flush(self) -> None:
        """Do nothing: only the last step is shown."""

    def close(self) -> None:
        self._server.close()
