"""`rollouts trace`: which weights and which request sampled each token of one rollout."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import CheckpointError, ConfigError, DataError, InferenceError
from holdfast.launcher.liveness import open_directly
from holdfast.protocol.inference import GENERATE_ROUTE, WEIGHTS_ROUTE, GenerateRequest, GenerateResponse, ServedWeights
from holdfast.protocol.rollouts import Rollout, VersionSpan, decode_packed
from holdfast.run.manifest import read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import holds_adapter, listed_digest
from holdfast.view.answers import find_batch, read_batch_at, sampler_of, shown_text, text_of
from holdfast.view.tables import Grid, Report, number

_Answer = TypeVar("_Answer")

# A busy server takes long for a long answer.
_ANSWER_TIMEOUT_S = 600.0


def trace(run_dir: RunDir, *, step: str, index: int, server: str | None = None) -> Report:
    """Show for each part of one rollout the weights and the request that sampled it.

    A server with these weights answers the `request` of a part with the same tokens: `server` is asked, and other
    tokens are a problem. Raise as `show`; InferenceError if the server does not answer, or has none of the weights."""
    batch = read_batch_at(find_batch(run_dir, "trace", step))
    if not 0 <= index < len(batch.rollouts):
        raise ConfigError(f"INDEX {index}: batch {batch.step} has the rollouts 0 to {len(batch.rollouts) - 1}.")
    rollout, text = batch.rollouts[index], text_of(run_dir)
    digests = {batch.policy_version: batch.weights_digest, **batch.older_digests}
    parts = [
        {
            "start": span.start,
            "end": span.end,
            "version": span.version,
            "weights": _kept(run_dir.weights_of(span.version), digests[span.version]),
            "weights_digest": digests[span.version],
            "request": msgspec.to_builtins(_request(rollout, span, digests[span.version])),
            "text": text.decode(ids := rollout.token_ids[span.start : span.end].tolist()),
            "token_ids": ids,
        }
        for span in rollout.versions
    ]
    document = {
        "step": batch.step,
        "index": index,
        "environment": rollout.environment,
        "task_id": rollout.task_id,
        "sample_index": rollout.sample_index,
        "reward": rollout.reward,
        "parts": parts,
    }
    title = (
        f"batch {batch.step}, rollout {index}: sample {rollout.sample_index} of task {rollout.task_id} of "
        f"{rollout.environment}, reward {number(rollout.reward)}"
    )
    if not parts:
        if server is not None:
            sampler = sampler_of(batch)
            raise ConfigError(f"--server: {sampler} sampled this rollout, not the policy. Leave --server out.")
        return Report(document, [title, f"sampled by {sampler_of(batch)}"])
    rows = [
        (
            f"{part['start']}-{part['end'] - 1}",
            str(part["version"]),
            "kept" if part["weights"] else "removed",
            part["weights_digest"],
            str(part["request"]["seeds"][0]),
            shown_text(part["text"], part["token_ids"]),
        )
        for part in parts
    ]
    shown = [title, Grid((">tokens", ">version", "weights", "digest of the weights", ">seed", "text"), rows)]
    if server is None:
        return Report(document, shown)
    server = server.rstrip("/")
    served = _asked(server, WEIGHTS_ROUTE, None, ServedWeights).digest
    known = [part for part in parts if part["weights_digest"] == served]
    if not known:
        way = way_to([part["weights"] for part in parts if part["weights"]])
        raise InferenceError(f"{server} serves weights that sampled no token of this rollout. {way}")
    problems = []
    for part in known:
        choices = _asked(server, GENERATE_ROUTE, msgspec.json.encode(part["request"]), GenerateResponse).choices
        found, sampled = [choice.token_ids.tolist() for choice in choices], part["token_ids"]
        if found != [sampled]:
            problems.append(f"tokens {part['start']}-{part['end'] - 1} are {sampled}, and {server} samples {found}")
    of_others = f"; {len(parts) - len(known)} are of other weights" if len(known) < len(parts) else ""
    again = f"{server} samples the same tokens in {len(known) - len(problems)} of {len(known)} parts{of_others}"
    return Report(document | {"server": server, "problems": problems}, [*shown, again], problems)


def way_to(kept: Sequence[str]) -> str:
    """Return how the user gets a server with the last of the weights that are `kept`."""
    if not kept:
        return "Those that did are removed."
    if holds_adapter(Path(kept[-1])):
        return f"{kept[-1]}, which did, is an adapter: only servers of the run sample with it."
    return f"`inference --model.name {kept[-1]}` serves weights that did."


def _kept(weights: Path, digest: str) -> str | None:
    """Return the place of weights; None where there are none, or others, such as of another attempt."""
    try:
        return str(weights) if listed_digest(read_manifest(weights), weights) == digest else None
    except (CheckpointError, DataError, OSError):
        return None


def _asked(server: str, route: str, body: bytes | None, kind: type[_Answer]) -> _Answer:
    try:
        request = urllib.request.Request(server + route, body, {"Content-Type": "application/json"})
        with open_directly(request, timeout_s=_ANSWER_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=kind, dec_hook=decode_packed)
    except urllib.error.HTTPError as error:
        raise InferenceError(f"{server} refuses a request: {error.read().decode(errors='replace'):.500}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InferenceError(f"--server {server} does not answer as an inference server: {error}") from None


def _request(rollout: Rollout, span: VersionSpan, digest: str) -> GenerateRequest:
    begin = max(start for start in rollout.branch_starts if start <= span.start)
    return GenerateRequest(
        token_ids=rollout.token_ids[begin : span.start].tolist(),
        seeds=[span.seed],
        max_tokens=span.end - span.start,
        weights_digest=digest,
        **msgspec.structs.asdict(rollout.sampling),
    )
