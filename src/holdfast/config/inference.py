"""Configuration of the inference server."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from holdfast.config.base import Command, DType, ModelConfig, Section
from holdfast.config.marks import Mark


class ServedModelConfig(ModelConfig):
    """The model to serve."""

    dtype: DType | None = None
    """Dtype of weights and activations in the engine; equal to the trainer's for the least mismatch. Unset: under `rl`
    the trainer's; for a server by itself bfloat16 on CUDA and float32 on CPU."""

    fp32_lm_head: bool = False
    """Compute logits in float32 where `dtype` is bfloat16; equal to the trainer's for the least mismatch."""

    max_len: int = Field(default=2048, ge=2)
    """Most tokens of prompt and completion together."""

    load: Literal["auto", "dummy"] = "auto"
    """`auto` loads the weights of `model.name`; `dummy` waits for a pushed version."""


class ServerConfig(Section):
    """Address of the server."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind. Anything other than loopback needs an admin token."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port. Unset, `rl` uses an unowned server at 8000, or starts its own at the first free port from 8000 on."""

    model_name: str | None = Field(default=None, min_length=1)
    """Name that OpenAI clients give as `model`; unset: `model.name`. Runs that use the server go by `model.name`
    anyway."""

    admin_token_env: str = "HOLDFAST_ADMIN_TOKEN"
    """Environment variable with the token that the admin routes ask for (`Authorization: Bearer`), on loopback too
    where it is set."""

    health_timeout_s: float = Field(default=20.0, gt=0)
    """An engine that answers a probe later than this is reported as failing by `/health`."""

    update_timeout_s: float = Field(default=1800.0, gt=0)
    """An engine that needs longer than this to take new weights counts as hung; meanwhile nobody asks it how it is."""

    lease_s: float = Field(default=90.0, gt=0)
    """A run that pushes weights owns the server until it ends, or is silent for this long: then another may
    push its own. The server that `rl` starts itself stays its own."""

    @field_validator("host")
    @classmethod
    def _may_be_a_host(cls, host: str) -> str:
        try:
            host.encode("idna")
        except UnicodeError:
            raise ValueError("is not the name or address of a machine") from None
        return host

    @property
    def url(self) -> str:
        """URL at which this machine reaches it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class EngineConfig(Section):
    """The vLLM engine."""

    device: Literal["auto", "cpu"] = "auto"
    """`cpu`: compute on the CPU, with vLLM's build for CPUs, though this machine has GPUs. `auto`: what the installed
    vLLM is built for; its build for CPUs is refused on a machine with GPUs."""

    threads: Annotated[int | None, Mark.FREE] = Field(default=None, ge=1)
    """CPU threads of the engine; unset: in `rl` all cores, divided by the engines; in `evaluate` all; in `inference`
    half, as in evaluations beside a training; on GPUs what vLLM takes."""

    max_num_seqs: Annotated[int, Mark.FREE] = Field(default=256, ge=1)
    """Most sequences decoded at once."""

    kv_cache_bytes: Annotated[int, Mark.FREE] = Field(default=134_217_728, ge=1_048_576)
    """Memory of the key-value cache on CPU."""

    gpu_memory_utilization: Annotated[float | None, Mark.FREE] = Field(default=None, gt=0, le=1)
    """Share of GPU memory that the engine may use. Unset: 0.9; on the only GPU, shared with the trainer, what a step
    leaves by its plan; 0.4 on several shared GPUs, or without a plan (docs/memory.md)."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one model is split over."""

    eager: Annotated[bool | None, Mark.DEVICE] = None
    """Skip torch.compile and CUDA graphs: starts 15-30 s sooner, slower on GPUs. Unset: only on a CPU."""

    args: dict[str, str | int | float | bool] = {}
    """Further vLLM server arguments by name, such as {"max-num-batched-tokens" = 8192}."""

    @field_validator("args")
    @classmethod
    def _has_one_replica(cls, args: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        if {"data-parallel-size", "data_parallel_size"} & args.keys():
            raise ValueError(
                "data-parallel-size makes replicas, and new weights are only known to reach one of them: start more "
                "servers instead (inference.engines of `rl`)"
            )
        return args


class InferenceConfig(Command):
    """The vLLM server: `uv run inference @ configs/reverse_text/infer.toml`."""

    model: ServedModelConfig = Field(default_factory=ServedModelConfig)
    """The model to serve."""

    server: Annotated[ServerConfig, Mark.FREE] = Field(default_factory=ServerConfig)
    """Address and access."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The vLLM engine."""

    deterministic: bool = False
    """On GPUs compute every request as if there were no others (vLLM's batch invariance), for less throughput: Hopper
    GPUs and newer. On CPU that holds already, and this changes nothing."""

    engines: Annotated[int, Mark.FREE] = Field(default=1, ge=1)
    """Servers that `rl` starts, each with an engine and a log of its own, at `server.port` and the ports after it. On
    GPUs unset: as many as have room on what `trainer.parallel.num_ranks` leaves, or on half of all."""

    @model_validator(mode="after")
    def _has_ports(self) -> Self:
        last = self.server.port + self.engines - 1
        if last > 65535:
            raise ValueError(
                f"engines = {self.engines} need the ports {self.server.port} to {last}, and the last one there is is "
                "65535: lower server.port"
            )
        return self

    def of_each(self) -> "dict[str, InferenceConfig]":
        """Return the configuration of every server by the name of its process: `inference`, or `inference_0` and on."""
        if self.engines == 1:
            return {"inference": self}
        servers = {}
        for number in range(self.engines):
            one = servers[f"inference_{number}"] = self.model_copy(deep=True)
            one.engines = 1
            one.server.port += number
        return servers

    @property
    def urls(self) -> list[str]:
        """URLs at which this machine reaches the servers."""
        return [one.server.url for one in self.of_each().values()]


def is_engine(process: str) -> bool:
    """Return whether a process of a run, by its name, is one of its inference servers."""
    return process == "inference" or process.startswith("inference_")
