"""`rollout_matching` and `group_relative`: how answers are generated, matched and rewarded."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from learner.objectives.config import PipelineConfig
from learner.objectives.objective import Weight
from learner.types import BackendName
from shared_contracts.infer import Temperature, TopK, TopP
from shared_contracts.rollout_config import SharedRolloutConfig
from shared_contracts.strict_model import FreeOnResume, Refusal, StrictModel

DecodeMode = Literal["greedy", "sampling", "beam"]


class DecodingConfig(StrictModel):
    temperature: Temperature = Field(default=0.0, description="temperature of sampling; 0: greedy")
    top_p: TopP = Field(default=1.0, description="probability mass that is sampled from")
    top_k: TopK = -1
    """number of most likely tokens that are sampled from; -1 and 0: all"""


class MatchingConfig(StrictModel):
    """How predictions are matched to ground truths, and the targets of matched points."""

    candidate_top_k: int = Field(default=10, ge=1)
    """ground truths considered per prediction"""
    maskiou_gate: float = Field(default=0.3, ge=0, le=1)
    """pairs with a lower mask IoU never match"""
    maskiou_resolution: int = Field(default=256, ge=2, le=4096)
    """side of the mask canvas in pixels"""
    fp_cost: float = Field(default=1.0, ge=0, description="cost of leaving a prediction unmatched")
    fn_cost: float = Field(default=1.0, ge=0)
    """cost of leaving a ground truth unmatched"""
    ot_cost: Literal["l1", "l2"] = "l2"
    """distance of points in the transport plan of a polygon"""
    ot_epsilon: float = Field(default=0.5, gt=0)
    """weight of the plan's entropy, in bins; points closer than a few times this are averaged"""
    ot_iters: int = Field(default=30, ge=1, description="rounds of Sinkhorn")


class OffloadConfig(StrictModel):
    enabled: bool = False
    """free device memory while a colocated server works"""
    offload_model: bool = False
    """move the weights of the model to host memory"""
    offload_optimizer: bool = False
    """move the state of the optimizer to host memory"""


class AsyncRolloutConfig(StrictModel):
    """Rollouts that run beside training instead of within a step (ASYNC-01)."""

    enabled: bool = False
    """false: step mode; true needs `vllm.mode: server` and `vllm.sync.mode: full`"""
    queue_limit: int = Field(default=8, ge=1)
    """most packs that a process keeps ready; if there are more, the oldest are dropped"""
    prefetch_target_packs: int = Field(default=2, ge=1)
    """packs each process tries to keep ready"""
    version_window: int = Field(default=2, ge=0)
    """a pack is dropped if its weights are more versions than this older than the newest"""
    sync_every_steps: int = Field(default=1, ge=1)
    """optimizer steps between pushes of weights"""

    def disagreements(self) -> Iterator[Refusal]:
        if self.enabled and self.version_window == 0 and self.sync_every_steps == 1:
            yield Refusal(
                "0, and weights are pushed before every step: no pack made before it could be used",
                "Use 1 or more, or raise sync_every_steps",
                "version_window",
            )
        if self.prefetch_target_packs > self.queue_limit:
            yield Refusal(
                f"{self.prefetch_target_packs} packs do not fit into queue_limit "
                f"{self.queue_limit}",
                "Lower it, or raise queue_limit",
                "prefetch_target_packs",
            )


class EvalDetectionConfig(StrictModel):
    """How evaluations are decoded, and what they do beyond precision, recall and F1 (EVAL-01)."""

    enabled: bool = False
    """add COCO's average precision to every evaluation's metrics"""
    save_answers: bool = False
    """keep the answers, scores and COCO files of every evaluation in the folder `evaluations` of
    the run"""
    greedy: bool = False
    """decode the answers of evaluations greedily, also where rollouts are sampled"""

    def disagreements(self) -> Iterator[Refusal]:
        if self.save_answers and not self.enabled:
            found = "is true, and enabled is false: nothing would be kept"
            do = "Set rollout_matching.eval_detection.enabled to true, or it to false"
            yield Refusal(found, do, "save_answers")


class RolloutMatchingConfig(SharedRolloutConfig):
    """`rollout_matching`: the backend, and how answers are decoded, matched and prefetched."""

    rollout_backend: FreeOnResume[Literal["vllm", "hf"]] = "vllm"
    """what generates answers: vLLM, or transformers in the learner itself"""
    decode_mode: DecodeMode = "greedy"
    """greedy and beam need `decoding.temperature` 0; beam works only with `hf`"""
    num_beams: int | None = Field(default=None, ge=2)
    """number of beams, with `decode_mode: beam`"""
    offload: FreeOnResume[OffloadConfig] = OffloadConfig()
    """what is moved away to make room for a colocated server; no effect without one"""
    max_new_tokens: int = Field(ge=1, description="longest answer in tokens")
    decoding: DecodingConfig = Field(default=DecodingConfig(), description="sampling parameters")
    repetition_penalty: float = Field(default=1.0, gt=0)
    """penalty for repeated tokens; 1: none"""
    logprobs: FreeOnResume[bool] = False
    """keep the log-probability of each token of an answer; an evaluation's AP then ranks boxes by
    them, and channel B logs how far the trainer's are from them (`mismatch/*`); not with `hf`"""
    max_logprob_mismatch: FreeOnResume[float | None] = Field(default=None, gt=0)
    """largest `mismatch/all_mean` of a step, in nats; a larger one ends the run; needs `logprobs:
    true`; null: no bound"""
    matching: MatchingConfig = MatchingConfig()
    """how predictions are matched to ground truths"""
    async_rollout: AsyncRolloutConfig = AsyncRolloutConfig()
    """asynchronous rollouts"""
    eval_detection: FreeOnResume[EvalDetectionConfig] = EvalDetectionConfig()
    """what a run's evaluations measure and keep"""
    pipeline: PipelineConfig | None = None
    """the objective of stage2_rollout_aligned; required there, refused with other variants"""

    @property
    def backend(self) -> BackendName:
        """The implementation of the rollout backend (ARCH-03)."""
        return "hf" if self.rollout_backend == "hf" else self.vllm.mode

    def disagreements(self) -> Iterator[Refusal]:
        yield from self._of_decoding()
        yield from self._of_logprobs()
        yield from self._of_beams()
        yield from self._of_lengths()
        if self.async_rollout.enabled:
            yield from self._of_async()

    def _of_decoding(self) -> Iterator[Refusal]:
        temperature, sampled = self.decoding.temperature, self.decode_mode == "sampling"
        if sampled != (temperature > 0):
            do = "Add rollout_matching.decode_mode: sampling, or set it to 0"
            do = "Raise it above 0, or set decode_mode to greedy" if sampled else do
            found = f"{temperature} with decode_mode: {self.decode_mode}"
            yield Refusal(found, do, "decoding.temperature")

    def _of_logprobs(self) -> Iterator[Refusal]:
        if self.logprobs and self.rollout_backend == "hf":
            do = "Set it to false, or rollout_matching.rollout_backend to vllm"
            yield Refusal("is true, and the backend hf returns none", do, "logprobs")
        if self.max_logprob_mismatch is not None and not self.logprobs:
            found = f"{self.max_logprob_mismatch}, and logprobs is false: nothing is compared"
            do = "Set rollout_matching.logprobs to true, or remove the bound"
            yield Refusal(found, do, "max_logprob_mismatch")

    def _of_beams(self) -> Iterator[Refusal]:
        beam = self.decode_mode == "beam"
        if beam and self.rollout_backend != "hf":
            do = "Use greedy, or set rollout_matching.rollout_backend to hf"
            yield Refusal("beam, and rollout_backend is vllm", do, "decode_mode")
        if beam != (self.num_beams is not None):
            found = "is missing with" if beam else "is given without"
            do = "Set it to 2 or more" if beam else "Remove it, or set decode_mode to beam"
            yield Refusal(f"{found} decode_mode: beam", do, "num_beams")
        elif beam and self.eval_detection.greedy:
            found = "is true, and decode_mode is beam, which evaluations use, too"
            do = "Set it to false, or decode_mode to greedy or sampling"
            yield Refusal(found, do, "eval_detection.greedy")
        elif self.num_beams is not None and self.num_beams > self.decode_batch_size:
            yield Refusal(
                f"{self.num_beams} beams are decoded at once for one answer, and "
                f"decode_batch_size is {self.decode_batch_size}",
                "Raise rollout_matching.decode_batch_size to num_beams, or lower num_beams",
                "num_beams",
            )

    def _of_lengths(self) -> Iterator[Refusal]:
        longest = self.vllm.max_model_len
        if longest is not None and longest <= self.max_new_tokens:
            yield Refusal(
                f"{longest} leaves no room for a prompt before max_new_tokens "
                f"{self.max_new_tokens}",
                "Raise it, or lower rollout_matching.max_new_tokens",
                "vllm.max_model_len",
            )
        guard = self.repeat_terminate
        if guard.enabled and guard.min_new_tokens >= self.max_new_tokens:
            yield Refusal(
                f"{guard.min_new_tokens}, and no answer is longer than max_new_tokens "
                f"{self.max_new_tokens}: the guard has no effect",
                "Lower it, or set repeat_terminate.enabled to false",
                "repeat_terminate.min_new_tokens",
            )

    def _of_async(self) -> Iterator[Refusal]:
        if self.backend != "server":
            found = f"is true, and the backend is {self.backend}"
            do = "Set it to false, or use rollout_backend: vllm with vllm.mode: server"
            yield Refusal(found, do, "async_rollout.enabled")
        if self.vllm.sync.mode != "full":
            found = f"{self.vllm.sync.mode}, and async_rollout.enabled is true"
            do = "Use full, or set async_rollout.enabled to false"
            yield Refusal(found, do, "vllm.sync.mode")


class RewardConfig(StrictModel):
    """The terms of a reward. Shares are of all entries of the answer, invalid ones too."""

    f1_weight: Weight = Field(description="weight of the F1@mIoU of the answer")
    duplicate_weight: Weight = Field(
        description="subtracted, times the share of objects that repeat an earlier one"
    )
    duplicate_iou: float = Field(
        gt=0, le=1, description="IoU from which an object of the same description is a repetition"
    )
    oversized_weight: Weight = Field(
        description="subtracted, times the share of oversized objects that are no hit"
    )
    oversized_share: float = Field(
        gt=0, le=1, description="share of the image from which an object is oversized"
    )
    invalid_weight: Weight = Field(
        description="subtracted, times the share of objects that are dropped as invalid"
    )

    def disagreements(self) -> Iterator[Refusal]:
        weights = (self.f1_weight, self.duplicate_weight, self.oversized_weight)
        if not any((*weights, self.invalid_weight)):
            found = "every weight is 0: all answers have the same reward, and nothing is learned"
            yield Refusal(found, "Set f1_weight to 1")


class GroupRelativeConfig(StrictModel):
    """Groups of sampled answers, and how an answer is compared with the others of its group."""

    group_size: int = Field(ge=2, description="answers to each sample of a step of channel B")
    advantage: Literal["mean", "mean_std"] = Field(
        description="`mean`: the reward less the mean of its group; `mean_std`: this over the "
        "standard deviation of the group"
    )
    credit: Literal["answer", "object"] = Field(
        default="answer",
        description="`answer`: each token has the advantage of its answer; `object`: that of its "
        "object, by what the object adds to the reward of the objects before it",
    )
    reward: RewardConfig = Field(description="the terms of an answer's reward; all its keys")
