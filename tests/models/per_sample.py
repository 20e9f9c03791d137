"""Attention of one sample at a time, in the place of the GPU's kernel for samples of any length."""

import torch
from torch import Tensor


class PerSample:
    """Attention one sample at a time, which insists on what the kernel insists on; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.windows = set[tuple[int, int]]()

    def __call__(
        self, query_THD: Tensor, key_EKD: Tensor, value_EKD: Tensor, query_borders: Tensor, key_borders: Tensor,
        longest: int, *, scale: float, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        self.windows.add(window_size)
        for borders, tokens in ((query_borders, query_THD), (key_borders, key_EKD), (key_borders, value_EKD)):
            assert borders.dtype == torch.int32 and borders.ndim == 1 and borders[0] == 0
            assert borders[-1] == len(tokens) and borders.diff().min() > 0
        queries, keys = query_borders.diff().tolist(), key_borders.diff().tolist()
        assert all(own <= seen for own, seen in zip(queries, keys, strict=True))
        assert query_THD.shape[-1] == key_EKD.shape[-1] == value_EKD.shape[-1]
        assert query_THD.shape[-1] % 8 == 0 and query_THD.shape[1] % key_EKD.shape[1] == 0
        assert longest == max(keys) and all(tensor.stride(-1) == 1 for tensor in (query_THD, key_EKD, value_EKD))
        before, behind = window_size
        assert behind == 0
        parts = zip(query_THD.split(queries), key_EKD.split(keys), value_EKD.split(keys), strict=True)
        return torch.cat([self._attend(*part, scale, before) for part in parts])

    @staticmethod
    def _attend(query_LHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scale: float, before: int) -> Tensor:
        group = query_LHD.shape[1] // key_LKD.shape[1]
        key_LHD, value_LHD = (tensor.repeat_interleave(group, 1) for tensor in (key_LKD, value_LKD))
        scores_HLL = torch.einsum("ihd,jhd->hij", query_LHD, key_LHD) * scale
        place = torch.arange(len(key_LKD))
        distance = place[-len(query_LHD) :, None] - place[None, :]
        seen = distance >= 0 if before < 0 else (distance >= 0) & (distance <= before)
        return torch.einsum("hij,jhd->ihd", scores_HLL.masked_fill(~seen, -torch.inf).softmax(-1), value_LHD)
