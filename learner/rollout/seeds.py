"""Seeds of sampled rollouts (SEED-01): pure functions of where a request stands.

    rollout_seed_base(training_seed, global_step)       31 bits, one per optimizer step
      -> rank_seed_base(base, rank)                     the rank above those 31 bits
        -> request_seed(rank_base, micro_step, request) one per request

    request_seed = 1 + base * 2**21 + micro_step_idx * 2**12 + req_idx

Within a micro step seeds count up by one. A server gives the i-th request of a call the
seed of the call plus i, so a call carries the seed of its first request, and the seed of a
request does not depend on how the requests were spread over servers.

No two requests of a step share a seed for up to 4096 requests a micro step, 512 micro
steps and any number of ranks; up to 1024 ranks every seed is at most 2**62.
"""

_BASE_BITS = 31
_MICRO_STEP_BITS = 9
_REQUEST_BITS = 12


def rollout_seed_base(training_seed: int, global_step: int) -> int:
    """Seed base of an optimizer step, in 0..2**31 - 1."""
    return (training_seed + global_step * 1_000_003) & 0x7FFFFFFF


def rank_seed_base(base: int, rank: int) -> int:
    """Seed base of one learner rank; rank 0 keeps the base of the step."""
    return base + (rank << _BASE_BITS)


def request_seed(base: int, micro_step_idx: int, req_idx: int) -> int:
    """Seed of one request, never 0.

    base: of the rank (`rank_seed_base`).
    micro_step_idx: of the micro step within the optimizer step.
    req_idx: counts over the requests of the rank in this micro step.
    """
    offset = (base << _MICRO_STEP_BITS) + micro_step_idx
    return 1 + (offset << _REQUEST_BITS) + req_idx
