"""Real orchestrators for tests of faults; this file is also the helper's program, see `forking`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from holdfast.shared.config.orchestrator import OrchestratorConfig
from tests.faults import faulty_calls, power_cut
from tests.faults.forking import ForkingHelper, serve


class Orchestrators(ForkingHelper):
    """Runs orchestrators one after the other. Use as a context manager."""

    def run(self, config: OrchestratorConfig, *, recording: Path | None = None, **fault: Any) -> int:
        """Run one to its end; return its exit code, negative for a signal.

        Args:
            recording: where to write what power cuts could have left; see `power_cut`.
            fault: options of `faulty_calls.install`; its trail is `output_dir` with the suffix `.trail`.
        """
        output = config.output_dir
        toml = output.with_suffix(".toml")
        toml.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
        request = {"directory": str(output), "toml": str(toml), "trail": str(output.with_suffix(".trail"))}
        request["recording"] = str(recording) if recording else ""
        return self._ask({**request, "fault": fault}, log=output.with_suffix(".log"))


def _child(request: dict[str, Any]) -> NoReturn:
    from holdfast.orchestrator.main import main

    if request["recording"]:
        save = power_cut.record(Path(request["directory"]))
        try:
            main([request["toml"]])
        finally:
            save(Path(request["recording"]))
    Path(request["trail"]).unlink(missing_ok=True)
    faulty_calls.install(request["directory"], request["trail"], **request["fault"])
    main([request["toml"]])
    raise AssertionError("an orchestrator ends by sys.exit")


if __name__ == "__main__":
    serve(["holdfast.orchestrator.main"], _child)
