"""The engines that generate, as clocks with given speeds, and the calls that a rank makes to them.

Continuous    vLLM: a sequence enters as soon as a place is free, and leaves when it ends
Batches       transformers' `generate`: a batch waits for its longest answer
Dispatch      which requests of a rank a server has, and when

The engines prefill the prompts of what enters, beside which nothing else runs, and then take steps
of `step_s + step_per_sequence_s * running` seconds. The first token comes with the prefill: an
answer of n tokens and its end takes n steps.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from simpy import Environment, Event

from learner.operate.simulate.inputs import EngineSpeed, Setting, Tokens
from learner.rollout.distribution import (
    CHUNKS_AHEAD,
    cut,
    most_at_once,
    next_call,
    plan_chunks,
    rank_caps,
    rank_chunk_size,
)

# What a process of the simulation yields, and how it ends.
Wait = Generator[Event, Any, None]

# Samples that are asked for, and the wait for their answers.
Answers = tuple[Sequence[Tokens], Wait]

_ROUNDING = 1e-9


@dataclass
class Asked:
    """One request. left: decode steps to its end. limit: most that it might take."""

    prompt: int
    left: int
    limit: int


@dataclass
class Use:
    """What an engine did. busy_s: in which it ran anything. decoded_s: sequences * seconds."""

    busy_s: float = 0.0
    decoded_s: float = 0.0
    tokens: int = 0
    sequences: int = 0


class Continuous:
    """Decodes at most `places` sequences at once; further ones wait in line."""

    def __init__(self, env: Environment, speed: EngineSpeed, places: int) -> None:
        self._env = env
        self._speed = speed
        self._places = places
        self._waiting: deque[tuple[Asked, Event]] = deque()
        self._running: list[tuple[Asked, Event]] = []
        self._arrival = env.event()
        self.use = Use()
        env.process(self._work())

    @property
    def outstanding(self) -> int:
        """Tokens to prefill, or that may still be decoded."""
        waiting = sum(asked.prompt + asked.limit for asked, _ in self._waiting)
        return waiting + sum(asked.prompt + asked.limit for asked, _ in self._running)

    def submit(self, asked: Asked) -> Event:
        """Happens when the answer is complete."""
        answered = self._env.event()
        self._waiting.append((asked, answered))
        if not self._arrival.triggered:
            self._arrival.succeed()
        return answered

    def _work(self) -> Wait:
        while True:
            if self._waiting and len(self._running) < self._places:
                yield from self._prefill()
            elif self._running:
                yield from self._decode()
            else:
                self._arrival = self._env.event()
                yield self._arrival

    def _prefill(self) -> Wait:
        entering: list[tuple[Asked, Event]] = []
        while self._waiting and len(self._running) + len(entering) < self._places:
            entering.append(self._waiting.popleft())
        self._running += entering
        seconds = sum(asked.prompt for asked, _ in entering) / self._speed.prefill_tokens_per_s
        self.use.busy_s += seconds
        self.use.sequences += len(entering)
        self.use.tokens += sum(asked.left for asked, _ in entering)
        yield self._env.timeout(seconds)
        self._leave()

    def _decode(self) -> Wait:
        """Steps until a sequence ends, or one comes that could enter."""
        count = len(self._running)
        step = self._speed.step_s + self._speed.step_per_sequence_s * count
        steps = min(asked.left for asked, _ in self._running)
        began = self._env.now
        over: Event = self._env.timeout(steps * step)
        if count < self._places:
            self._arrival = self._env.event()
            yield over | self._arrival
            taken = ceil((self._env.now - began) / step - _ROUNDING)
            steps = min(steps, max(1, taken))
            if not over.processed:
                yield self._env.timeout(max(0.0, began + steps * step - self._env.now))
        else:
            yield over
        self.use.busy_s += steps * step
        self.use.decoded_s += steps * step * count
        for asked, _ in self._running:
            asked.left -= steps
        self._leave()

    def _leave(self) -> None:
        for asked, answered in self._running:
            if asked.left == 0:
                answered.succeed()
        self._running = [(asked, answered) for asked, answered in self._running if asked.left]


class Server:
    """Engines behind one address, each request to the one with the fewest outstanding tokens."""

    def __init__(self, env: Environment, speed: EngineSpeed, replicas: int, places: int) -> None:
        self._env = env
        self._call_s = speed.call_s
        self.engines = [Continuous(env, speed, places) for _ in range(replicas)]

    def answer(self, requests: Sequence[Asked]) -> Wait:
        """One call: it ends with the last answer."""
        yield self._env.timeout(self._call_s)
        answers = []
        for asked in requests:
            engine = min(self.engines, key=lambda engine: engine.outstanding)
            answers.append(engine.submit(asked))
        yield self._env.all_of(answers)


class Batches:
    """The learner's own model: batches of at most `rows`, one after the other."""

    def __init__(self, env: Environment, speed: EngineSpeed, rows: int) -> None:
        self._env = env
        self._speed = speed
        self._rows = rows
        self.use = Use()

    def answer(self, requests: Sequence[Asked]) -> Wait:
        """Prompts are padded to the longest of their batch."""
        for start in range(0, len(requests), self._rows):
            batch = requests[start : start + self._rows]
            width = len(batch) * max(asked.prompt for asked in batch)
            steps = max(asked.left for asked in batch)
            decode = steps * (self._speed.step_s + self._speed.step_per_sequence_s * len(batch))
            seconds = self._speed.call_s + width / self._speed.prefill_tokens_per_s + decode
            self.use.busy_s += seconds
            self.use.decoded_s += decode * len(batch)
            self.use.tokens += sum(asked.left for asked in batch)
            self.use.sequences += len(batch)
            yield self._env.timeout(seconds)


class Gathering:
    """The ranks of the learner, which wait for each other as in `learner.distributed.peers`."""

    def __init__(self, env: Environment, count: int) -> None:
        self.count = count
        self._env = env
        self._values: dict[int, Any] = {}
        self._complete = env.event()

    def all_gather(self, rank: int, value: Any = None) -> Generator[Event, Any, list[Any]]:
        """The value of each rank, in their order, as soon as all ranks have called."""
        assert rank not in self._values, "ranks make the same calls in the same order"
        self._values[rank] = value
        complete = self._complete
        if len(self._values) == self.count:
            values, self._values = self._values, {}
            self._complete = self._env.event()
            complete.succeed([values[rank] for rank in range(self.count)])
        result: list[Any] = yield complete
        return result


class Machines:
    """Engines and ranks on one clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.env = Environment()
        self.peers = Gathering(self.env, setting.ranks)
        self._rollout = rollout = setting.config.rollout_matching
        self._own: list[Batches] = []
        self.servers: list[Server] = []
        engine, shape = setting.speeds.engine, setting.speeds.server
        if rollout.backend == "hf":
            rows = rollout.decode_batch_size // (rollout.num_beams or 1)
            rows = 1 if rollout.decoding.temperature else rows
            self._own = [Batches(self.env, engine, rows) for _ in range(setting.ranks)]
        else:
            places = shape.max_num_seqs or rollout.decode_batch_size * shape.tensor_parallel_size
            self.servers = [
                Server(self.env, engine, shape.replicas, places) for _ in range(setting.servers)
            ]

    @property
    def uses(self) -> list[list[Use]]:
        """Of the engines of each server; of each rank, where it generates itself."""
        if self._own:
            return [[own.use] for own in self._own]
        return [[engine.use for engine in server.engines] for server in self.servers]

    def samples(self, batch: int, rank: int) -> list[Tokens]:
        """What rank `rank` has in batch `batch`, which stands for the step of its number."""
        setting = self.setting
        return [setting.lengths.of(batch, i) for i in setting.order.rank_batch(batch, rank)]

    def push(self) -> Wait:
        """The newest weights to the servers."""
        if self.servers:
            yield self.env.timeout(self.setting.speeds.push.seconds)

    def chunks(self, rank: int, samples: Sequence[Tokens]) -> list[Answers]:
        """What a rank asks for in a step, in order (STEP-03); one that generates has one chunk."""
        asked = self._asked(samples)
        if self._own:
            return [(samples, self._own[rank].answer(asked))]
        dispatch = self._dispatch(rank, asked, self._size(samples))
        return [
            (samples[chunk.start : chunk.stop], dispatch.wait_for(chunk))
            for chunk in dispatch.chunks
        ]

    def rounds(self, rank: int, samples: Sequence[Tokens]) -> list[Answers]:
        """The same beside training, where a round is asked for when the one before is there."""
        made = []
        for part in cut(len(samples), self._size(samples)):
            asked = self._asked(of_round := samples[part.start : part.stop])
            dispatch = self._dispatch(rank, asked, len(asked))
            made.append((of_round, dispatch.wait_for(*dispatch.chunks)))
        return made

    def _size(self, samples: Sequence[Tokens]) -> int:
        """Of a chunk of `samples`, where servers answer; one server of the learner has them all."""
        setting, rollout = self.setting, self._rollout
        if rollout.backend != "server":
            return len(samples)
        return rank_chunk_size(rollout.decode_batch_size, setting.world_sizes, setting.ranks)

    def _asked(self, samples: Sequence[Tokens]) -> list[Asked]:
        limit = self._rollout.max_new_tokens
        return [Asked(tokens.prompt, min(tokens.answer, limit), limit) for tokens in samples]

    def _dispatch(self, rank: int, asked: Sequence[Asked], size: int) -> "Dispatch":
        setting = self.setting
        batch = self._rollout.decode_batch_size
        caps = rank_caps(batch, setting.world_sizes, setting.ranks, rank)
        return Dispatch(self.env, self.servers, caps, setting.ranks, asked, size)


class Dispatch:
    """One rollout of a rank over the servers, as `learner.rollout.dispatch` makes it.

    chunks: of the requests `asked`, `size` in each.
    """

    def __init__(
        self,
        env: Environment,
        servers: Sequence[Server],
        caps: Sequence[int],
        ranks: int,
        asked: Sequence[Asked],
        size: int,
    ) -> None:
        self.chunks = cut(len(asked), size)
        self._env = env
        self._servers = servers
        self._caps = caps
        self._ranks = ranks
        self._asked = asked
        self._later = deque(self.chunks)
        self._queues = [deque[range]() for _ in servers]
        self._unanswered = set(range(len(asked)))
        self._calls: dict[Event, tuple[int, range]] = {}  # that run: server and requests

    def wait_for(self, chunk: range) -> Wait:
        """Until a chunk is answered; chunks are waited for in order, and no calls begin between."""
        ahead = CHUNKS_AHEAD * len(self.chunks[0])
        while self._later and self._later[0].start <= chunk.start + ahead:
            opened = self._later.popleft()
            parts = plan_chunks(len(opened), self._caps)
            for queue, part in zip(self._queues, parts, strict=True):
                queue.append(opened[part.start : part.stop])
        self._send()
        while not self._unanswered.isdisjoint(chunk):
            ended = yield self._env.any_of(self._calls)
            for call in ended:
                self._unanswered.difference_update(self._calls.pop(call)[1])
            self._send()

    def _send(self) -> None:
        for at in range(len(self._servers)):
            while (requests := self._next_part(at)) is not None:
                asked = self._asked[requests.start : requests.stop]
                call = self._env.process(self._servers[at].answer(asked))
                self._calls[call] = at, requests

    def _next_part(self, at: int) -> range | None:
        """The requests of the next call of server `at`; None without a free place."""
        queue = self._queues[at]
        while queue and not queue[0]:
            queue.popleft()
        running = [requests for server, requests in self._calls.values() if server == at]
        most = most_at_once(self._caps[at])
        free = most - sum(map(len, running))
        waiting = sum(map(len, [*queue, *self._later]))
        count = next_call(waiting, free, most, self._ranks, len(running))
        if not queue or count == 0:
            return None
        requests = queue.popleft()
        queue.appendleft(requests[count:])
        return requests[:count]
