"""Which replica takes a request: the one with the fewest outstanding tokens (SRV-01)."""


class Router:
    """Counts, per replica, the tokens it still has to prefill or may still decode."""

    def __init__(self, replicas: int) -> None:
        self.outstanding = [0] * replicas

    def acquire(self, tokens: int) -> int:
        """Choose the least loaded replica (the first of equals) and charge it."""
        replica = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
        self.outstanding[replica] += tokens
        return replica

    def release(self, replica: int, tokens: int) -> None:
        self.outstanding[replica] -= tokens
        assert self.outstanding[replica] >= 0
