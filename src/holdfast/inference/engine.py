"""vLLM's engine, set up from the project's configuration.

Importing this module imports vLLM, which takes many seconds. `inference.main` sets the environment before, since vLLM
and torch read it at import.
"""

import itertools
import multiprocessing
import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import vllm.model_executor.models.registry as model_registry
import vllm.v1.engine.utils as engine_utils
from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from holdfast.chat.template import tool_format_of
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import InferenceConfig
from holdfast.config.base import DeviceType
from holdfast.errors import ConfigError, DataError, shown
from holdfast.inference.access import RequestError
from holdfast.inference.weights import read_label
from holdfast.inference.worker import LOAD_FORMAT, prepare_engine_process
from holdfast.process.events import report
from holdfast.protocol.inference import Choice, GenerateRequest, SampledSpan
from holdfast.protocol.rollouts import Logprobs, TokenIds

# On CPU: prompts of one step that are prefilled together; chunked prefill is off, so at least model.max_len.
_MIN_BATCHED_TOKENS = 8192

# A process that has closed its files ends within milliseconds.
_EXIT_TIMEOUT_S = 10.0

# Arguments that the server sets itself.
_RESERVED = (
    "model", "tokenizer", "served-model-name", "host", "port", "seed", "dtype", "max-model-len", "load-format",
    "worker-extension-cls", "logprobs-mode", "enable-chunked-prefill", "uds", "api-key", "generation-config"
)  # fmt: skip

_request_ids = itertools.count()
_OWN_REQUESTS = "generate-"
"""The first letters of the ids of our own requests; vLLM's routes have others."""
_UNCHANGED: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "repetition_penalty": (1.0,), "logit_bias": (None, {}), "min_tokens": (0,),
    "allowed_token_ids": (None, []), "bad_words": (None, []), "thinking_token_budget": (None,),
}  # fmt: skip
"""Values of sampling parameters that leave the model's distribution as it is, or only take its best token."""

_SWITCHES = ("disable-log-stats",)
"""Flags that vLLM has no `--no-` form of: false leaves them out."""


def vllm_arguments(config: InferenceConfig, model_dir: Path, tokenizer_dir: Path, device: DeviceType) -> list[str]:
    """Return the command line of vLLM's server. Raise ConfigError if `engine.args` sets a reserved argument."""
    engine = config.engine
    arguments = {
        "model": str(model_dir),
        "tokenizer": str(tokenizer_dir),
        "served-model-name": config.server.model_name or config.model.name,
        "host": config.server.host,
        "port": config.server.port,
        "seed": config.seed,
        "dtype": config.model.dtype,
        "max-model-len": config.model.max_len,
        "load-format": LOAD_FORMAT if config.model.load == "auto" else "dummy",
        "worker-extension-cls": "holdfast.inference.worker.PolicyWorker",
        # Log-probabilities of the distribution that tokens are sampled from: after temperature and truncation.
        "logprobs-mode": "processed_logprobs",
        # The model's own top-p and top-k would bend the distribution that the policy is trained on.
        "generation-config": "vllm",
        "max-num-seqs": engine.max_num_seqs,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "enforce-eager": engine.eager,
        "disable-log-stats": True,
    }
    if device == "cpu":
        # With a seed per request, chunked prefill ends the engine on CPU.
        arguments |= {
            "enable-chunked-prefill": False,
            "max-num-batched-tokens": max(_MIN_BATCHED_TOKENS, config.model.max_len, engine.max_num_seqs),
            "kv-cache-memory-bytes": engine.kv_cache_bytes,
        }
    else:
        arguments |= {"gpu-memory-utilization": engine.gpu_memory_utilization}
    given = {name.replace("_", "-"): value for name, value in engine.args.items()}
    tools = None if given.keys() & {"tool-call-parser", "enable-auto-tool-choice"} else tool_parser_of(tokenizer_dir)
    if tools is not None:
        arguments |= {"enable-auto-tool-choice": True, "tool-call-parser": tools}
    if config.model.fp32_lm_head:
        if "hf-overrides" in given:
            raise ConfigError(
                "engine.args.hf-overrides cannot be set together with model.fp32_lm_head, which sets it: add "
                '"head_dtype": "float32" to it, and leave model.fp32_lm_head out.'
            )
        arguments["hf-overrides"] = '{"head_dtype": "float32"}'
    if taken := sorted(given.keys() & set(_RESERVED)):
        where = " Set server.model_name." if taken[0] == "served-model-name" else ""
        raise ConfigError(
            f"engine.args.{taken[0]} cannot be set: the server sets it itself from its other settings.{where}"
        )
    # `given` last: what the user sets wins.
    wanted = {name: value for name, value in (arguments | given).items() if value is not None}
    return [_flag(name, value) for name, value in wanted.items() if value is not False or name not in _SWITCHES]


def tool_parser_of(tokenizer_dir: Path) -> str | None:
    """Return which of vLLM's parsers reads the tool calls of the chat template; None if the template shows none."""
    try:
        tokenizer = load_tokenizer(str(tokenizer_dir))
        return tool_format_of(tokenizer.template(tools=[]).source) if tokenizer.has_template else None
    except (ConfigError, DataError):  # vLLM may read this tokenizer, or says what is wrong with it
        return None


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def parse_arguments(arguments: list[str]) -> Namespace:
    """Parse vLLM's command line. Raise ConfigError if vLLM refuses an argument."""
    parser = make_arg_parser(FlexibleArgumentParser())

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"vLLM refuses its arguments (engine.args): {message}")

    # argparse would print its usage and exit.
    parser.error = refuse  # type: ignore[method-assign]
    if current_platform.is_cpu():
        # vLLM looks at the model's class in a second process that imports everything again, so that this process
        # does not touch CUDA. A CPU has no CUDA.
        model_registry._run_in_subprocess = lambda inspect: inspect()
    args = parser.parse_args(arguments)
    assert args is not None
    validate_parsed_serve_args(args)
    return args


@asynccontextmanager
async def running_engine(args: Namespace) -> AsyncIterator[AsyncLLM]:
    """Start the engine's process, yield its client, and end it."""
    _wait_for_exit_codes()
    if current_platform.is_cpu():
        _cache_prefixes(args)
        _fork_engine()
    async with build_async_engine_client(args) as engine:
        assert isinstance(engine, AsyncLLM)
        yield engine


def end_turns(engine: AsyncLLM, tokenizer_dir: Path) -> None:
    """Have vLLM's own routes stop where `rl` does: its generation_config.json may lack the end of a turn."""
    known = engine.input_processor.generation_config_fields
    ends = known.get("eos_token_id") or []
    with suppress(ConfigError, DataError):  # the template is for no chats, or vLLM reads this tokenizer in its own way
        stops = load_tokenizer(str(tokenizer_dir)).stop_token_ids
        known["eos_token_id"] = sorted({*([ends] if isinstance(ends, int) else ends), *stops})


def give_logprobs_of_model(engine: AsyncLLM) -> None:
    """Have vLLM's own routes give the log-probabilities that vLLM documents: before temperature, cuts and penalties.

    This engine computes them after, as the trainer needs them. Without changes to the distribution, and if the best
    token is taken, both are the same. For other requests see `_with_logprobs_of_model`."""
    generate = engine.generate

    def generated(prompt: Any, params: Any, request_id: str, **named: Any) -> AsyncGenerator[RequestOutput]:
        if isinstance(params, SamplingParams) and not request_id.startswith(_OWN_REQUESTS):
            changed = [name for name, values in _UNCHANGED.items() if getattr(params, name) not in values]
            if changed and (params.logprobs is not None or params.logprob_token_ids):
                return _with_logprobs_of_model(engine, generate, prompt, params, request_id, changed, named)
        return generate(prompt, params, request_id, **named)

    engine.generate = generated  # type: ignore[method-assign]


async def _with_logprobs_of_model(
    engine: AsyncLLM,
    generate: Callable[..., AsyncGenerator[RequestOutput]],
    prompt: Any,
    params: SamplingParams,
    request_id: str,
    changed: list[str],
    named: dict[str, Any],
) -> AsyncGenerator[RequestOutput]:
    """Generate without log-probabilities, then read the answer as a prompt, whose log-probabilities are the model's.

    A stream gets the whole answer at its end. An answer that would fill the model's length is a token shorter. Raise
    VLLMValidationError if a grammar masks tokens, the log-probabilities are asked for by token, or the prompt leaves no
    room; EngineGenerateError if other weights came meanwhile, whose log-probabilities would be others."""
    for name in ("structured_outputs", "logprob_token_ids"):
        if getattr(params, name):
            raise VLLMValidationError(
                f"logprobs with {name} and {changed[0]} = {shown(getattr(params, changed[0]))} are not supported. "
                f"Leave {' and '.join(changed)} out, or leave logprobs out.",
                parameter="logprobs",
            )
    asked = params.clone()
    asked.logprobs, asked.output_kind = None, RequestOutputKind.FINAL_ONLY
    # Reading needs room for a token after the answer.
    room = engine.model_config.max_model_len - len(prompt["prompt_token_ids"]) - 1
    if room < 1:
        raise VLLMValidationError(
            f"logprobs with {changed[0]} = {shown(getattr(params, changed[0]))} need room for two tokens, and the "
            f"prompt has {len(prompt['prompt_token_ids'])} of {engine.model_config.max_model_len} "
            f"tokens. Leave {' and '.join(changed)} or logprobs out, or shorten the prompt.",
            parameter="logprobs",
        )
    asked.max_tokens = min(asked.max_tokens or room, room)
    asked.min_tokens = min(asked.min_tokens, asked.max_tokens)  # else the engine's process refuses, and serves no more
    read = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=params.logprobs, output_kind=RequestOutputKind.FINAL_ONLY
    )
    more = {name: named[name] for name in ("lora_request", "priority") if name in named}
    async with aclosing(generate(prompt, asked, request_id, **named)) as outputs:
        async for output in outputs:
            before = output.prompt_token_ids or []
            for choice in output.outputs:
                tokens = tokens_input([*before, *choice.token_ids])
                async for reading in generate(tokens, read, f"{request_id}-{choice.index}-logprobs", **more):
                    labels = [span.version for one in (choice, *reading.outputs) for span in one.weight_versions or []]
                    if len({*labels}) > 1:
                        raise EngineGenerateError(
                            "the weights changed before the log-probabilities were read: ask again"
                        )
                    found: Any = reading.prompt_logprobs
                    choice.logprobs = found[len(before) :]
            yield output


async def generate_one_token(engine: AsyncLLM) -> None:
    """Have the engine generate a token. Raise EngineDeadError or EngineGenerateError if it cannot."""
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    async for _ in engine.generate(tokens_input([0]), params, f"probe-{time.monotonic_ns()}"):
        pass


class VllmSampler:
    """Samples with vLLM's engine; implements `holdfast.inference.routes.SamplingEngine`."""

    died: type[Exception] = EngineDeadError

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.max_len: int = engine.model_config.max_model_len
        self.vocab_size: int = engine.model_config.get_vocab_size()

    @property
    def has_died(self) -> bool:
        return self._engine.errored

    async def probe(self, *, generates: bool) -> str | None:
        if not generates:
            await self._engine.get_weight_version()  # the answer comes from the engine's own loop
            return None
        try:
            await generate_one_token(self._engine)
        except EngineGenerateError as error:
            return f"the probe of the engine failed: {error.__cause__ or error}"
        return None

    async def sample(self, request: GenerateRequest, index: int, seed: int) -> Choice:
        params = SamplingParams(
            seed=seed,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,  # what the request names ends it, and nothing else
            stop=[*request.stop],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            logprobs=0,  # of the sampled token only
            prompt_logprobs=0 if request.prompt_logprobs else None,
            flat_logprobs=True,  # no object for each token
            detokenize=bool(request.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(request.token_ids)
        try:
            async for output in self._engine.generate(prompt, params, f"{_OWN_REQUESTS}{next(_request_ids)}"):
                choice = _choice(index, output.outputs[0])
                if request.prompt_logprobs:
                    found: Any = output.prompt_logprobs
                    # The first token has none.
                    choice.prompt_logprobs = [
                        float(found[place][token_id].logprob)
                        for place, token_id in enumerate(request.token_ids[1:], start=1)
                    ]
                return choice
        except VLLMClientError as error:
            raise RequestError(400, str(error)) from None
        raise AssertionError("the engine ended a request without an output")


def _choice(index: int, output: CompletionOutput) -> Choice:
    logprobs: Any = output.logprobs
    labelled = [(*read_label(span.version), span) for span in output.weight_versions or []]
    return Choice(
        index=index,
        token_ids=TokenIds(output.token_ids),
        logprobs=Logprobs(logprobs.logprobs),
        finish_reason=output.finish_reason or "abort",
        versions=[SampledSpan(version, span.start, span.end, digest=digest) for version, digest, span in labelled],
    )


async def build_vllm_app(engine: AsyncLLM, args: Namespace) -> FastAPI:
    """Return vLLM's OpenAI-compatible application around `engine`."""
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return app


def _wait_for_exit_codes() -> None:
    """Have vLLM wait for the exit code of an engine that dies at its start: else a kill looks like a bad model."""
    manager = engine_utils.CoreEngineProcManager
    finished_processes = manager.finished_procs

    def with_exit_codes(self: engine_utils.CoreEngineProcManager) -> dict[str, int]:
        for process in self.processes:
            if process.pid is not None and connection.wait([process.sentinel], timeout=0):
                process.join(_EXIT_TIMEOUT_S)
        return finished_processes(self)

    manager.finished_procs = with_exit_codes  # type: ignore[method-assign]


def _cache_prefixes(args: Namespace) -> None:
    """Keep the prompts' prefixes in blocks of 32 tokens, or not at all, unless `engine.args` says otherwise.

    vLLM's blocks on CPUs have 128 tokens, and only full blocks are shared: a group would compute a shorter prompt once
    for each answer. For models with a recurrent state vLLM needs chunked prefill to keep prefixes, and then the result
    of a request depends on the requests beside it."""
    model = AsyncEngineArgs.from_cli_args(args).create_model_config()
    if model.dtype is torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():  # then oneDNN emulates them
        report(
            "WARNING: this CPU has no instructions for bfloat16, so the last bits of log-probabilities depend on which "
            "requests share a batch: no two runs have the same bits. With model.dtype float32 they have"
        )
    if not model.has_inner_state:
        if args.block_size is None and not model.use_mla:  # MLA has its own block size
            args.block_size = 32
        return
    if args.enable_prefix_caching is None:
        args.enable_prefix_caching = False
    if args.max_num_seqs != 1:
        report(
            "WARNING: the model has a recurrent state, so the last bits of its log-probabilities depend on which "
            "requests share a batch: no two runs have the same bits. With --inference.engine.max-num-seqs 1 they "
            "have, and sampling takes longer"
        )


def _fork_engine() -> None:
    """Let vLLM fork its engine instead of spawning it, which saves a second import of everything.

    On CPU only: CUDA contexts and OpenMP teams do not survive a fork, so this process must not compute with torch."""
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[assignment]
    server_pid = forking_pid = os.getpid()

    def before() -> None:
        nonlocal forking_pid
        forking_pid = os.getpid()

    def in_child() -> None:
        # Only children of the server are engines. `getppid` would be wrong if the server has died since the fork.
        if forking_pid == server_pid:
            prepare_engine_process(parent=server_pid)

    os.register_at_fork(before=before, after_in_child=in_child)
