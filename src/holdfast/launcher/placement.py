"""Places the processes of a run on a cluster, and tells them the addresses of the others."""

import ipaddress
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.config.inference import InferenceConfig
from holdfast.config.rl import RlConfig
from holdfast.errors import ConfigError
from holdfast.launcher.cluster.channels import LineChannel
from holdfast.launcher.cluster.cluster import Cluster, check_shared, requests_of, trainer_names, wait_for_places
from holdfast.launcher.cluster.hosts import RemoteHost
from holdfast.launcher.cluster.ray import RayCluster
from holdfast.launcher.cluster.slurm import SlurmCluster
from holdfast.launcher.devices import Machine, gpus_per_engine
from holdfast.launcher.plan import Plan
from holdfast.launcher.server_choice import Servers
from holdfast.process.gpus import NUMBERED_BY_DRIVER, VISIBLE_DEVICES_ENV, Gpu, Inventory, torch_build
from holdfast.protocol.inference import read_admin_token
from holdfast.trainer.launch import ENDPOINT_ENV, NODE_RANK_ENV

_RDZV_PORT = 29400


@dataclass
class ClusterPlacement:
    """The processes of a run on a cluster.

    Attributes:
        machine: the GPUs of one trainer node and of all engines, as if they were of one machine.
        starts_inference: the run has servers of its own.
    """

    cluster: Cluster
    machine: Machine
    starts_inference: bool
    _ports: dict[LineChannel, int] = field(default_factory=dict)

    def servers(self, config: RlConfig) -> Servers:
        """Return what the run samples with."""
        urls = ", ".join(config.orchestrator.client.urls)
        return Servers(self.starts_inference, "" if self.starts_inference else f"using the inference servers at {urls}")

    def wait(self, config: RlConfig) -> None:
        """Wait until every process has a place; raise `ConfigError` after `cluster_timeout_s`."""
        timeout_s = config.cluster_timeout_s
        try:
            # `time.sleep`: a signal ends the launcher, as nothing has been started.
            wait_for_places(self.cluster, timeout_s=timeout_s, pause=time.sleep, say=partial(print, flush=True))
        except TimeoutError as missing:
            raise ConfigError(
                f"the cluster had no places within {timeout_s:g} s (cluster_timeout_s): {missing}"
            ) from None

    def tell_addresses(self, config: RlConfig) -> None:
        """Write into `config` where the servers of the run listen."""
        if not self.starts_inference:
            return
        urls = []
        for name, one in config.inference.of_each().items():
            self.tell_address(name, one)
            urls.append(one.server.url)
        config.orchestrator.client.urls = urls

    def tell_address(self, name: str, config: InferenceConfig) -> None:
        """Write into the configuration of one server where it listens. Raise ConfigError if other machines can reach
        it, and it has no admin token."""
        host, server = self.cluster.host(name), config.server
        if not ipaddress.ip_address(host.address).is_loopback and read_admin_token(server.admin_token_env) is None:
            raise ConfigError(
                f"other machines can reach the inference server at {host.address}, so it needs an admin token: set "
                f"the environment variable {server.admin_token_env}, which every process of the run is given"
            )
        server.host, server.port = host.address, self._port(host, first=server.port)

    def plan(self, plan: Plan, config: RlConfig) -> Plan:
        """Return `plan` with every process in its place, and a trainer on each of its nodes."""
        names = trainer_names(config.trainer.parallel.nodes)
        commands = {name: argv for name, argv in plan.commands.items() if name != "trainer"}
        commands |= dict.fromkeys(names, plan.commands["trainer"])
        check_shared(self.cluster, list(commands), plan.attempt.run_dir.path, files=plan.paths)
        environments: dict[str, dict[str, str]] = {name: {} for name in commands}
        for name in commands:
            if devices := self.cluster.devices(name):
                environments[name] |= {VISIBLE_DEVICES_ENV: ",".join(map(str, devices)), **NUMBERED_BY_DRIVER}
        if len(names) > 1:
            first = self.cluster.host("trainer")
            port = self._port(first, first=_RDZV_PORT)
            endpoint = f"[{first.address}]:{port}" if ":" in first.address else f"{first.address}:{port}"
            for node, name in enumerate(names):
                environments[name] |= {NODE_RANK_ENV: str(node), ENDPOINT_ENV: endpoint}
        hosts = {name: self.cluster.host(name) for name in commands}
        return replace(plan, commands=commands, hosts=hosts, environments=environments)

    def _port(self, host: RemoteHost, *, first: int) -> int:
        """Return a port that the agent on `host` reserves for this run."""
        if host.channel not in self._ports:
            self._ports[host.channel] = host.ask("reserve", first)
        return self._ports[host.channel]


@contextmanager
def placed_on_cluster(config: RlConfig) -> Iterator[ClusterPlacement | None]:
    """Find places for the processes of a run on the cluster that `config` names, if any; give them back at the end.

    A dry run takes nothing. Raise ConfigError if the cluster is not there, or is too small for this run."""
    nodes = config.trainer.parallel.nodes
    if config.cluster is None:
        if nodes > 1:
            raise ConfigError(
                f"trainer.parallel.nodes = {nodes}: without --cluster `rl` starts all on this machine. Name a cluster, "
                "or start `trainer` on every node, and `orchestrator` and `inference` beside it"
            )
        yield None
        return
    starts_inference = _starts_inference(config)
    cluster: Cluster
    if config.cluster == "slurm":
        cluster = SlurmCluster()
    else:
        cluster = RayCluster(config.cluster.partition("://")[2] or None, config.cluster_strategy)
    try:
        on_gpus = cluster.has_gpus and config.trainer.parallel.device != "cpu"
        _check_ranks(config, on_gpus=on_gpus)
        cluster.check(requests_of(config, on_gpus=on_gpus, starts_inference=starts_inference))
        if not on_gpus:  # `requests_of` asks for so many cores
            config.trainer.parallel.threads = config.trainer.parallel.threads or 1
            config.inference.engine.threads = config.inference.engine.threads or 1
        run = ClusterPlacement(
            cluster, _machine(config, on_gpus=on_gpus, starts_inference=starts_inference), starts_inference
        )
        if not config.dry_run:
            run.wait(config)
            run.tell_addresses(config)
        yield run
    finally:
        cluster.close()


def _starts_inference(config: RlConfig) -> bool:
    """Whether the run has servers of its own; refuse `server.host`, which the cluster chooses."""
    if "host" in config.inference.server.model_fields_set:
        raise ConfigError(
            f"inference.server.host = '{config.inference.server.host}' names one machine, and `cluster` chooses it: "
            "leave it out. Name a running server with --orchestrator.client.urls."
        )
    is_own = config.orchestrator.client.urls == config.inference.urls
    return is_own and not config.orchestrator.is_sampled_by_teacher


def _check_ranks(config: RlConfig, *, on_gpus: bool) -> None:
    """Refuse settings for the GPUs of one machine."""
    if config.share_gpus:
        raise ConfigError(
            "share_gpus is for one machine, and `cluster` gives every process GPUs of its own: leave one of them out"
        )
    if on_gpus and config.trainer.parallel.num_ranks is None:
        raise ConfigError(
            "on a cluster with GPUs set --trainer.parallel.num-ranks: the ranks, and GPUs, of each node of the trainer"
        )


def _machine(config: RlConfig, *, on_gpus: bool, starts_inference: bool) -> Machine:
    if not on_gpus:
        return Machine(Inventory(), torch_build(), "cpu")
    engines = config.inference.engines * gpus_per_engine(config.inference) if starts_inference else 0
    gpus = tuple(Gpu(str(number)) for number in range(config.trainer.parallel.ranks + engines))
    return Machine(Inventory(gpus), torch_build(), "cuda")
