"""Whether a batch was sampled by the weights that this trainer published, and not only by their number."""

from __future__ import annotations

from holdfast.shared.files.manifest import is_committed, read_manifest
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.files.weights_digest import listed_digest
from holdfast.shared.process.events import report
from holdfast.shared.wire.rollouts import Batch


def check_provenance(run_dir: RunDir, batch: Batch) -> bool:
    """Return whether `batch` was sampled by the published weights of its version; say so where it was not.

    A trainer that goes on from a checkpoint makes the versions behind it again, and trains on batches that the
    versions before the restart sampled. Where a machine repeats its bits these are the same weights. Where it does
    not, the batch is as stale as the two differ, though their number is the same. Weights that are not published
    any more are not compared, nor is a batch that a teacher sampled. Reads one small file.
    """
    path = run_dir.weights_of(batch.policy_version)
    if not batch.weights_digest or not is_committed(path):
        return True
    published = listed_digest(read_manifest(path), path)
    if published == batch.weights_digest:
        return True
    report(
        f"WARNING: batch {batch.step} was sampled by other weights than version {batch.policy_version} has now: digest "
        f"{batch.weights_digest}, published is {published}. This machine did not repeat the bits of the steps that it "
        "trained again; the batch is trained all the same, with the log-probabilities of what sampled it",
        step=batch.step,
    )
    return False
