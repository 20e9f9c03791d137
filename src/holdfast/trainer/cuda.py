"""CUDA as a rank needs it: there or refused, and computing what the settings say."""

from __future__ import annotations

import torch

from holdfast.shared.errors import ConfigError


def require_cuda() -> None:
    """Check that torch can use a GPU.

    Raises:
        ConfigError: it cannot, and why.
    """
    try:
        # Not `is_available`, which goes by the driver: whether torch can use what that sees shows here alone.
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, an old one; a build without CUDA
        reason = str(error).split(". ")[0]
        raise ConfigError(
            f"parallel.device = cuda, but torch finds no GPU here: {reason}. `nvidia-smi` shows what the driver sees; "
            "with --parallel.device cpu the CPU trains."
        ) from None


def set_numerics(*, deterministic: bool) -> None:
    """Make float32 products float32 (no TensorFloat-32), and with `deterministic` every result the same each time.

    An operation that has no such algorithm then raises a RuntimeError that names it.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Nothing of ours reads what was never written, and filling it takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
