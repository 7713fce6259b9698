"""The `server` backend: rollouts from servers reached by URL.

push_weights   to every server that is there; at least one must have them
rollout        take back who was lost -> Handout over those that may be asked
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential

from learner.rollout.backend import WeightChannel
from learner.rollout.client import RolloutClient
from learner.rollout.handout import Handout, Job
from learner.rollout.journal import Journal
from learner.rollout.member import Differences, Member, Sleep, no_differences
from learner.rollout.parallel import in_parallel
from learner.rollout.patience import Patience
from learner.types import RolloutOutput
from shared_contracts.errors import ProblemError, RunError
from shared_contracts.infer import RequestConfig, RolloutEnvelope, RolloutInferRequest

_REFUSED = 422


class ServerBackend:
    """Spreads rollouts over servers in contiguous chunks and keeps their order and seeds.

    Once weights were pushed, the servers are asked for answers of these weights and no
    others. A server that is lost is left out, and looked at before every push and rollout,
    though less and less often when it cannot take pushes. When no other is left, it is
    waited for: as long as it says that it is starting, else up to `timeout_s` of the clients.

    clients, channels: one per server, in the order of `servers[]`.
    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    journal: gets notes of every call and push. sleep: pauses between attempts.
    differences: between what a server that comes back says of itself and what it must be.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        channels: Sequence[WeightChannel],
        decode_batch_size: int,
        journal: Journal | None = None,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
    ) -> None:
        self._journal = journal or Journal()
        self._decode_batch_size = decode_batch_size
        self._timeout_s = max(client.timeout_s for client in clients)
        self._sleep = sleep
        self._version: int | None = None
        self._members = [
            Member(client, channel, self._journal, sleep, differences)
            for client, channel in zip(clients, channels, strict=True)
        ]

    def connect(self) -> int:
        """Form the weight group with every server; returns their newest weights version."""
        return max(in_parallel([member.connect for member in self._members]))

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Outputs in the order of the requests.

        Raises:
            RunError: no server is left and none came back in time, or a request was refused.
        """
        if not requests:
            return []
        self._take_back_lost()
        job = Job(requests, request_config, self._version)
        handout = Handout(
            job,
            self._members,
            self._decode_batch_size,
            self._journal,
            lambda: self._wait_for(self._take_back_lost),
            self._timeout_s,
        )
        envelopes = handout.run()
        self._journal.healthy = len(self._askable())
        return [_output(envelope) for envelope in envelopes]

    def push_weights(self, version: int) -> None:
        """Push to all servers at the same time; one that fails is lost.

        When all fail, they are waited for and pushed to once more.

        Raises:
            RunError: no server took the push.
        """
        for last_attempt in (False, True):
            members = self._wait_for(self._pushable)
            outcomes = in_parallel([partial(_bring_to, version, member) for member in members])
            errors = [outcome for outcome in outcomes if outcome is not None]
            if len(errors) < len(members):
                self._version = version
                return
            if last_attempt:
                raise errors[0]

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _askable(self) -> list[Member]:
        return [member for member in self._members if member.lost is None]

    def _lost(self) -> list[Member]:
        """Those to look at; who rests is left alone while there are others to ask."""
        lost = [member for member in self._members if member.lost is not None]
        if len(lost) == len(self._members):
            return lost
        return [member for member in lost if not member.rests()]

    def _pushable(self) -> list[Member]:
        """Who may be asked, and who is lost but could take a push now."""
        lost = self._lost()
        found = zip(lost, in_parallel([member.look for member in lost]), strict=True)
        back = [member for member, pushable in found if pushable]
        return [member for member in self._members if member.lost is None or member in back]

    def _take_back_lost(self) -> list[Member]:
        """Look at every lost server once; those that are back get the weights first (SYNC-07)."""
        in_parallel([partial(self._take_back, member) for member in self._lost()])
        return self._askable()

    def _take_back(self, member: Member) -> None:
        if member.look():
            _bring_to(self._version, member)

    def _wait_for(self, look: Callable[[], list[Member]]) -> list[Member]:
        """Look until there is someone.

        Raises:
            RunError: nobody while there was `Patience`.
        """
        patience = Patience(self._timeout_s)

        def is_over(_: RetryCallState) -> bool:
            if any(member.starting for member in self._members):
                patience.heard()
            return patience.end() is not None

        def nobody(_: RetryCallState) -> list[Member]:
            reasons = "; ".join(f"{member.url}: {member.lost}" for member in self._members)
            raise RunError(
                f"no rollout server can be pushed to and asked; {patience.end()}. {reasons}"
            )

        retry = Retrying(
            retry=retry_if_result(lambda found: not found),
            stop=is_over,
            wait=wait_exponential(multiplier=0.1, max=2.0),
            sleep=self._sleep,
            retry_error_callback=nobody,
        )
        return retry(look)


def _bring_to(version: int | None, member: Member) -> RunError | None:
    """Make `version` the member's weights; it is lost when that fails, for the error returned.

    Raises what would fail again.
    """
    try:
        if member.lost is None and version is not None:
            member.push(version)
        else:
            member.take_back(version)
    except RunError as error:
        if _is_final(error):
            raise
        member.lose(str(error))
        return error
    return None


def _is_final(error: RunError) -> bool:
    """Whether a server has refused what was pushed to it."""
    cause = error.__cause__
    return isinstance(cause, ProblemError) and cause.problem.status == _REFUSED


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
