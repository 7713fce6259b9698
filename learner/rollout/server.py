"""The `server` backend: rollouts from servers reached by URL.

push_weights   by process 0, to every server that is there; at least one must have them
rollout        take back who was lost -> Handout over those that may be asked
tend           process 0, while it waits for others: who was started anew gets the weights again

With several learner processes all of them ask the servers, and process 0 alone pushes (SYNC-08).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from learner.peers import ALONE, Peers
from learner.rollout.backend import PushNeeded, WeightChannel
from learner.rollout.client import RolloutClient
from learner.rollout.distribution import rank_caps, rank_chunk_size
from learner.rollout.handout import Handout, Job
from learner.rollout.journal import Journal
from learner.rollout.member import Differences, Member, Sleep, no_differences
from learner.rollout.patience import wait_for_one
from learner.rollout.pushed_member import PushedMember
from learner.rollout.upkeep import Following, Pushing, Upkeep
from learner.types import RolloutOutput
from shared_contracts.infer import RequestConfig, RolloutEnvelope, RolloutInferRequest

T = TypeVar("T")


class ServerBackend:
    """Spreads rollouts over servers in contiguous chunks and keeps their order and seeds.

    Once weights were pushed, the servers are asked for answers of these weights and no
    others. A server that is lost is left out, and looked at before every push and rollout,
    though less and less often when it cannot take pushes. When no other is left, it is
    waited for: as long as it says that it is starting, half an hour at most (`patience`); else
    up to `timeout_s` of the clients.

    clients: one per server, in the order of `servers[]`.
    channels: one per server in process 0, and none in the others.
    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    journal: gets notes of every call and push. sleep: pauses between attempts.
    differences: between what a server that comes back says of itself and what it must be.
    peers: the learner processes, each with a backend over the same servers.
    gather: called in each of them before process 0 pushes, where its weights are in pieces.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        channels: Sequence[WeightChannel],
        decode_batch_size: int,
        journal: Journal | None = None,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
        peers: Peers = ALONE,
        gather: Callable[[], None] | None = None,
    ) -> None:
        self._gather = gather
        self._journal = journal or Journal()
        self._decode_batch_size = decode_batch_size
        self._timeout_s = max(client.timeout_s for client in clients)
        self._sleep = sleep
        self._peers = peers
        self._handouts: set[Handout] = set()
        self._members: Sequence[Member]
        self._upkeep: Upkeep
        if peers.rank == 0:
            pushed = [
                PushedMember(client, channel, self._journal, sleep, differences)
                for client, channel in zip(clients, channels, strict=True)
            ]
            self._members, self._upkeep = pushed, Pushing(pushed, peers, self._wait_for)
        else:
            self._members = [Member(one, self._journal, sleep, differences) for one in clients]
            self._upkeep = Following(self._members, peers)

    def connect(self) -> int:
        """Form the weight group with every server; returns their newest weights version."""
        return self._upkeep.connect()

    def round_size(self) -> int:
        """Requests that this process asks at once (DIST-04)."""
        sizes = [member.world_size for member in self._members]
        return rank_chunk_size(self._decode_batch_size, sizes, self._peers.count)

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Outputs in the order of the requests; every process may ask for its own.

        Raises:
            RunError: no server is left and none came back in time, or a request was refused.
        """
        return self._rolled_out(requests, request_config, self._take_back_lost)

    def rollout_beside(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """`rollout` by what was pushed last while the training weights change: pushes nothing.

        Raises:
            PushNeeded: no server is left that has the weights, and there is one without them.
        """
        return self._rolled_out(requests, request_config, self._rejoin_lost)

    def _rolled_out(
        self,
        requests: Sequence[RolloutInferRequest],
        request_config: RequestConfig,
        look: Callable[[], list[Member]],
    ) -> list[RolloutOutput]:
        """look: takes back who is lost, if it can be; returns who may be asked."""
        if not requests:
            return []
        look()
        job = Job(requests, request_config, self._upkeep.version)
        caps = partial(
            rank_caps,
            self._decode_batch_size,
            learner_world_size=self._peers.count,
            rank=self._peers.rank,
        )
        handout = Handout(
            job,
            self._members,
            caps,
            self._journal,
            lambda: self._wait_for(look),
            self._timeout_s,
        )
        self._handouts.add(handout)
        try:
            envelopes = handout.run()
        finally:
            self._handouts.discard(handout)
        self._journal.healthy = len(self._askable())
        return [_output(envelope) for envelope in envelopes]

    def push_weights(self, version: int) -> None:
        """Push to all servers at the same time; one that fails is lost.

        Every process calls it, and none returns before all of them have its outcome. When all
        servers fail, they are waited for and pushed to once more.

        Raises:
            RunError: no server took the push; in every process.
        """
        if self._gather is not None:
            self._gather()
        self._upkeep.push(version)

    def tend(self) -> None:
        """Look after the servers while this process waits for others; cheap where all is well.

        Only while the training weights are those that were pushed last. Raises only what would
        fail again, as a push that a server refuses.
        """
        self._upkeep.tend()

    def close(self) -> None:
        """Give up what is being asked, in whatever thread; leave the servers."""
        for handout in tuple(self._handouts):
            handout.give_up()
        for member in self._members:
            member.close()

    def _askable(self) -> list[Member]:
        return [member for member in self._members if member.lost is None]

    def _take_back_lost(self) -> list[Member]:
        self._upkeep.take_back_lost()
        return self._askable()

    def _rejoin_lost(self) -> list[Member]:
        self._upkeep.rejoin_lost()
        askable = self._askable()
        if not askable and any(member.wants_push for member in self._members):
            reasons = "; ".join(f"{member.url}: {member.lost}" for member in self._members)
            raise PushNeeded(f"no rollout server has the weights any more ({reasons})")
        return askable

    def _wait_for(self, look: Callable[[], list[T]]) -> list[T]:
        """Look until there is someone; raises RunError when there was nobody for too long."""
        return wait_for_one(look, self._members, self._timeout_s, self._sleep)


def _output(envelope: RolloutEnvelope) -> RolloutOutput:
    choice = envelope.response.choices[0]
    stamp = envelope.coordexp
    assert envelope.response.prompt_token_ids is not None
    assert choice.token_ids is not None
    return RolloutOutput(
        prompt_token_ids=envelope.response.prompt_token_ids,
        response_token_ids=choice.token_ids,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        repeat_terminated=choice.index in stamp.repeat_terminated_choices,
        weights_version=stamp.weights_version,
        seed=stamp.seed,
    )
