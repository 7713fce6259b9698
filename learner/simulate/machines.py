"""What one simulation runs on: a clock, ranks, and who generates for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simpy import Environment

from learner.config.schema import Config
from learner.data.order import ShareOrder
from learner.preflight import check_processes, check_step_budget
from learner.rollout.distribution import call_size, plan_chunks, rank_caps, rank_chunk_size
from learner.simulate.engines import Asked, Batches, Server, Use, Wait
from learner.simulate.lengths import Lengths, Tokens
from learner.simulate.peers import Gathering
from learner.simulate.speeds import ServerShape, Speeds
from shared_contracts.errors import ContractError


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    servers: how many, each of the shape that `speeds` gives; a run of another backend has none
    or one. ranks: learner processes. steps: the first so many of the run.
    """

    config: Config
    speeds: Speeds
    lengths: Lengths
    servers: int = 1
    ranks: int = 1
    steps: int = 50

    @property
    def order(self) -> ShareOrder:
        """Which samples each step takes, as a run has it."""
        training = self.config.training
        batch = training.effective_batch_size
        shuffle = self.config.data.shuffle
        return ShareOrder(self.lengths.samples, batch, self.ranks, training.seed, shuffle)

    @property
    def run_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.training.total_steps(self.lengths.samples)

    @property
    def world_sizes(self) -> list[int]:
        shape = self.speeds.server
        return [shape.replicas * shape.tensor_parallel_size] * self.servers

    def with_machines(self, config: Config, counts: Mapping[str, int]) -> "Setting":
        """The same of another config; counts: servers, ranks, and the shape of each server."""
        shape = {key: value for key, value in counts.items() if key not in ("servers", "ranks")}
        server = self.speeds.server.model_copy(update=shape)
        return replace(
            self,
            config=config,
            speeds=self.speeds.model_copy(update={"server": server}),
            servers=counts.get("servers", self.servers),
            ranks=counts.get("ranks", self.ranks),
        )

    def check(self) -> None:
        """Raise ContractError for what preflight would refuse."""
        backend = self.config.rollout_matching.backend
        if backend != "server" and self.servers > 1:
            raise ContractError(
                "servers", f"{self.servers}, and the backend is {backend}", "Leave them out"
            )
        check_processes(self.config, self.ranks)
        check_step_budget(self.config, self.lengths.samples, self.ranks)


def declared_servers(config: Config) -> int:
    """As many as a run of the config asks."""
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    return 1 if server is None else len(server.servers)


def declared_shape(config: Config) -> ServerShape:
    """Of its servers, as far as the config says: of a colocated one."""
    rollout = config.rollout_matching
    size = rollout.vllm.tensor_parallel_size if rollout.backend == "colocate" else None
    return ServerShape() if size is None else ServerShape(tensor_parallel_size=size)


class Machines:
    """Engines and ranks on one clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.env = Environment()
        self.peers = Gathering(self.env, setting.ranks)
        rollout = setting.config.rollout_matching
        self._max_tokens = rollout.max_new_tokens
        self._decode_batch_size = rollout.decode_batch_size
        self._own: list[Batches] = []
        self.servers: list[Server] = []
        if rollout.backend == "hf":
            rows = rollout.decode_batch_size // (rollout.num_beams or 1)
            rows = 1 if rollout.decoding.temperature else rows
            engine = setting.speeds.engine
            self._own = [Batches(self.env, engine, rows) for _ in range(setting.ranks)]
        else:
            self.servers = [self._server() for _ in range(setting.servers)]

    def _server(self) -> Server:
        speeds = self.setting.speeds
        shape = speeds.server
        places = shape.max_num_seqs or self._decode_batch_size * shape.tensor_parallel_size
        return Server(self.env, speeds.engine, shape.replicas, places)

    @property
    def uses(self) -> list[list[Use]]:
        """Of the engines of each server; of each rank, where it generates itself."""
        if self._own:
            return [[own.use] for own in self._own]
        return [[engine.use for engine in server.engines] for server in self.servers]

    @property
    def round_size(self) -> int | None:
        """Requests a rank asks at once (STEP-03); None: all, and it does nothing else then."""
        if self.setting.config.rollout_matching.backend != "server":
            return None
        ranks = self.setting.ranks
        return rank_chunk_size(self._decode_batch_size, self.setting.world_sizes, ranks)

    def samples(self, share: int, rank: int) -> list[Tokens]:
        """What rank `rank` has in share `share`, which stands for the step of its number."""
        setting = self.setting
        return [setting.lengths.of(share, i) for i in setting.order.share(share, rank)]

    def push(self) -> Wait:
        """The newest weights to who generates."""
        if self.servers:
            yield self.env.timeout(self.setting.speeds.push.seconds)

    def answer(self, rank: int, samples: Sequence[Tokens]) -> Wait:
        """One rollout of a rank: each request once, as `learner.rollout` hands them out."""
        asked = [Asked(tokens.prompt, self._steps(tokens), self._max_tokens) for tokens in samples]
        if self._own:
            yield from self._own[rank].answer(asked)
            return
        ranks = self.setting.ranks
        caps = rank_caps(self._decode_batch_size, self.setting.world_sizes, ranks, rank)
        chunks = plan_chunks(len(asked), caps)
        yield self.env.all_of(
            [
                self.env.process(self._share(server, asked[chunk.start : chunk.stop], cap))
                for server, chunk, cap in zip(self.servers, chunks, caps, strict=True)
                if chunk
            ]
        )

    def _steps(self, tokens: Tokens) -> int:
        return min(tokens.answer, self._max_tokens)

    def _share(self, server: Server, requests: Sequence[Asked], cap: int) -> Wait:
        """A server's chunk, in slices of at most its cap (DIST-04)."""
        most = call_size(cap)
        for start in range(0, len(requests), most):
            yield from server.answer(requests[start : start + most])
