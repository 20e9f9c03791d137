"""Published weights: `weights/step_N`, a Hugging Face directory that from_pretrained and vLLM load.

With LoRA the directory has the merged model, and the adapter in `adapter/`; for engines, which have the base, only the
adapter. `holdfast.orchestrator.weight_sync` describes the whole weight push.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from holdfast.chat.tokenizer import complete_end_tokens
from holdfast.errors import DataError
from holdfast.protocol.inference import PARITY_PROMPT_NAME
from holdfast.run import atomic, manifest
from holdfast.run.manifest import FileEntry
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_DIR, listed_digest
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.decoder import DecoderModel
from holdfast.trainer.model.lora import Adapters, whole_tensors
from holdfast.trainer.model.safetensors_files import SafetensorsWriter
from holdfast.trainer.model.tensor_names import DTYPES, TensorLayout, fetched
from holdfast.trainer.model.weight_offers import WeightOffers

_CONFIG_NAME = "config.json"
_GENERATION_NAME = "generation_config.json"
_OLDER_NAMES = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Settings of rotary embeddings, which transformers 5 writes as `rope_parameters`. Older readers do not know those, and
take a default base in silence."""


class WeightPublisher:
    """Writes the policy as a Hugging Face directory, one tensor at a time."""

    def __init__(
        self,
        run_dir: RunDir,
        policy: DecoderModel,
        tokenizer: PreTrainedTokenizerBase,
        mesh: Mesh,
        *,
        dtype: str,
        layout: TensorLayout | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._policy = policy
        self._mesh = mesh
        self._dtype = DTYPES[dtype]
        self._layout = layout or TensorLayout(policy.hf_model, None)
        self._adapters = adapters
        self._settings = adapters.settings() if adapters else {}
        self.config_files = self._describe_model(tokenizer) if mesh.is_main else {}
        self.config_files |= {f"{ADAPTER_DIR}/{name}": content for name, content in self._settings.items()}

    def _describe_model(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
        """Return config and tokenizer files."""
        scratch = atomic.temporary_sibling(self._run_dir.weights / "description")
        scratch.mkdir(parents=True)
        try:
            hf_model = self._policy.hf_model
            config = type(hf_model.config).from_dict(hf_model.config.to_dict())
            config.dtype = self._dtype
            config.architectures = [type(hf_model).__name__]
            config.save_pretrained(scratch)
            _keep_older_names(scratch / _CONFIG_NAME, config, hf_model.name_or_path)
            if (generation_config := getattr(hf_model, "generation_config", None)) is not None:  # not a reward model
                # transformers would make another file of config.json, without the tokens that end a turn.
                if (name := hf_model.name_or_path) and (original := fetched(name, _GENERATION_NAME)):
                    shutil.copyfile(original, scratch / _GENERATION_NAME)
                else:
                    generation_config.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            complete_end_tokens(scratch)
            return {str(path.relative_to(scratch)): path.read_bytes() for path in scratch.rglob("*") if path.is_file()}
        finally:
            shutil.rmtree(scratch)

    def publish(
        self,
        version: int,
        *,
        path: Path | None = None,
        parity_prompt: bytes | None = None,
        for_engines: bool = False,
        offers: WeightOffers | None = None,
    ) -> Path:
        """Publish the policy's weights as `version`; return the directory. Collective.

        Args:
            path: unset: `weights/step_N`.
            parity_prompt: for engines; see `holdfast.protocol.inference`.
            for_engines: write only the adapter, if the policy has one.
            offers: offer whole weights to engines before they are written; None on all ranks except rank 0.

        Raise DataError if engines could not use the adapter.
        """
        adapter_alone = for_engines and self._adapters is not None
        if adapter_alone and self._adapters is not None and (regrouped := self._adapters.base.regrouped):
            raise DataError(
                f"model.lora.target_modules: the files of model.name hold '{regrouped[0]}' in another layout, so an "
                f"engine could not add the adapter to it ({len(regrouped)} such matrices). Leave it out, or train "
                "without model.lora."
            )
        final = path or self._run_dir.weights_of(version)
        temporary = atomic.temporary_sibling(final)
        if self._mesh.is_main:
            temporary.mkdir(parents=True)
        offered, written = None, {}
        if not adapter_alone:
            offered, written = self._write_tensors(temporary, version, offers)
        if self._adapters is not None:
            place = temporary if adapter_alone else temporary / ADAPTER_DIR
            self._adapters.write_factors(place, keep=self._mesh.is_main)
        if self._mesh.is_main:
            for name, content in (self._settings if adapter_alone else self.config_files).items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                (temporary / name).write_bytes(content)
            if parity_prompt is not None:
                (temporary / PARITY_PROMPT_NAME).write_bytes(parity_prompt)
            files = manifest.describe_files(temporary, known=written)
            listing = manifest.Manifest(kind="weights", step=version, policy_version=version, files=files)
            # The disk was handed bytes with these digests. An engine that reads other bytes refuses them.
            assert offered in (None, listed_digest(listing, temporary)), "other weights were offered than written"
            manifest.write_manifest(temporary, listing)
            if final.exists():
                atomic.remove_directory(final)
            atomic.publish_directory(temporary, final)
        return final

    def _write_tensors(
        self, directory: Path, version: int, offers: WeightOffers | None
    ) -> tuple[str | None, dict[str, FileEntry]]:
        """Gather tensors one by one to rank 0, which writes them.

        Returns:
            The digest of an offer, if there is one, and what rank 0 wrote.
        """
        files, digest = SafetensorsWriter(directory), None
        gathered: Iterable[tuple[str, Tensor]] = self._gathered(copy=offers is not None)
        if offers is not None:
            gathered = list(gathered)
            digest = offers.offer(version, gathered)
        for name, tensor in gathered:
            files.add(name, tensor)
        return digest, files.close() if self._mesh.is_main else {}

    def _gathered(self, *, copy: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files on rank 0, and some on others; `copy`: none shares memory with the policy."""
        is_main = self._mesh.is_main
        tensors = whole_tensors(self._policy.hf_model, keep=is_main, dtype=self._dtype, copy=copy)
        for name, tensor in self._layout.to_files(tensors) if is_main else tensors:
            yield name, tensor.contiguous()

    def prune(self, needed: set[int]) -> None:
        """Remove the published versions that are not `needed`."""
        if self._mesh.is_main:
            for version in self._run_dir.published_weights():
                if version not in needed:
                    atomic.remove_directory(self._run_dir.weights_of(version))


def _keep_older_names(path: Path, config: PreTrainedConfig, name: str | None) -> None:
    """Keep `_OLDER_NAMES` as config.json of model `name` has them, unless transformers would read another `config`."""
    original = fetched(name, _CONFIG_NAME) if name else None
    given = json.loads(original.read_bytes()) if original else {}
    if older := {key: given[key] for key in _OLDER_NAMES if key in given}:
        written = path.read_bytes()
        path.write_text(json.dumps({**older, **json.loads(written)}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        read = type(config).from_pretrained(path.parent)
        if getattr(read, "rope_parameters", None) != getattr(config, "rope_parameters", None):
            path.write_bytes(written)
