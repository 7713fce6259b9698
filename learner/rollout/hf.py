"""The `hf` backend: transformers' own `generate` on the model in training (ARCH-03).

    requests -> prompts -> left-padded batches -> generate -> RolloutOutput

The model answers with the weights it has, so a push only notes their version. A batch is sampled
with the seed of its first request, as a call of a server is. As on a server, no parameter of
decoding comes from the checkpoint, but the tokens that end an answer do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from learner.models.families import family_of
from learner.models.prompts import EncodedPrompt
from learner.rollout.backend import LEARNER, Call, Journal, RolloutBackend
from learner.types import RolloutOutput
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig, entry_token_ids


class HfRepeatProcessor(LogitsProcessor):
    """The repeat guard of one `generate` call (REP-03), as inside vLLM.

    A row that triggers can only continue with the first of `eos_token_ids`. Other rows keep their
    scores.

    prompt_length: width of the prompts, padding included; only the ids behind it are guarded.
    eos_token_ids: the ids that end a row; nothing is forced behind them.
    """

    def __init__(
        self,
        config: RepeatTerminateConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        entry = entry_token_ids(encode, config.answer_format)
        self._make_guard = partial(RepeatGuard, config, entry)
        self._prompt_length = prompt_length
        self._eos_token_ids = tuple(eos_token_ids)
        self._seen: torch.Tensor | None = None
        self._guards: list[RepeatGuard | None] = []  # None for a row that has ended
        self._forced: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores. input_ids: rows x ids so far; scores: rows x vocabulary."""
        for row, token_ids in enumerate(self._new_ids(input_ids)):
            self._take(row, token_ids)
        forced = [row for row, guard in enumerate(self._guards) if guard and guard.triggered]
        if forced:
            scores = scores.clone()
            scores[forced] = -torch.inf
            scores[forced, self._eos_token_ids[0]] = 0.0
            self._forced.update(map(tuple, input_ids[forced, self._prompt_length :].tolist()))
        return scores

    def ended(self, generated: Sequence[int]) -> bool:
        """Return whether the guard ended the answer `generated`, which lacks the final id.

        Verdicts depend on an answer's ids alone, so this holds for any row and any beam.
        """
        return tuple(generated) in self._forced

    def _new_ids(self, input_ids: torch.Tensor) -> list[list[int]]:
        """Return the new ids of each row since the last call; all ids if rows were reordered."""
        seen, taken = self._seen, self._prompt_length
        if seen is not None and torch.equal(seen, input_ids[:, : seen.shape[1]]):
            taken = seen.shape[1]
        else:
            self._guards = [self._make_guard() for _ in input_ids]
        self._seen = input_ids
        new_ids: list[list[int]] = input_ids[:, taken:].tolist()
        return new_ids

    def _take(self, row: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if token_id in self._eos_token_ids:
                self._guards[row] = None
            if guard := self._guards[row]:
                guard.push(token_id)


class HfBackend(RolloutBackend):
    """A backend that generates in the process of the learner.

    model: in training, in any mode; it is as before after every call.
    num_beams: above 1 the best beam of a search, in place of the greedy answer.
    compute_dtype: what the forward computes in where it is not that of the weights.
    max_model_len: longest prompt with its answer, where the model's context is longer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        encode: Callable[[RolloutInferRequest], EncodedPrompt],
        tokenizer: PreTrainedTokenizerBase,
        guard: RepeatTerminateConfig,
        decode_batch_size: int,
        num_beams: int = 1,
        compute_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(Journal(servers=None))
        self.repeat_terminate_active = guard.enabled
        self._model = model
        self._encode = encode
        self._tokenizer = tokenizer
        self._guard = guard
        self._rows = decode_batch_size // num_beams
        self._num_beams = num_beams
        self._compute_dtype = compute_dtype
        self._family = family_of(model)
        self._ends = end_token_ids(model, tokenizer)
        context = int(model.config.get_text_config().max_position_embeddings)
        self._context = min(context, max_model_len or context)

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Return outputs in the order of the requests. Raises RunError if a prompt is too long."""
        assert request_config.n == 1, "one answer per request"
        assert not request_config.stop, "stop strings belong to servers"
        outputs: list[RolloutOutput] = []
        dtype = self._compute_dtype
        autocast = torch.autocast(self._model.device.type, dtype, enabled=dtype is not None)
        with _answering(self._model), autocast:
            for start in range(0, len(requests), self._rows):
                prompts = [self._encode(each) for each in requests[start : start + self._rows]]
                rooms = [
                    self._room(start + index, prompt.ids.numel(), request_config.max_tokens)
                    for index, prompt in enumerate(prompts)
                ]
                seed = None if request_config.seed is None else request_config.seed + start
                outputs += self._batch(prompts, rooms, request_config, seed)
                self.journal.call(Call(LEARNER, start, len(prompts), seed, 1, "answered"))
        return outputs

    def push_weights(self, version: int) -> None:
        self.version.record(version)

    def close(self) -> None:
        """Do nothing: the backend holds no resources."""

    def _room(self, index: int, length: int, max_tokens: int | None) -> int:
        room = self._context - length
        if room < 1:
            raise RunError(
                f"infer_requests[{index}].messages: the prompt has {length} tokens, which leaves "
                f"no room for an answer in a context of {self._context} (the model's, or "
                "rollout_matching.vllm.max_model_len where that is less)"
            )
        return room if max_tokens is None else min(max_tokens, room)

    def _batch(
        self,
        prompts: Sequence[EncodedPrompt],
        rooms: Sequence[int],
        config: RequestConfig,
        seed: int | None,
    ) -> list[RolloutOutput]:
        """Return the answers of one `generate` call, sampled with `seed`, at most `rooms` long."""
        width = max(prompt.ids.numel() for prompt in prompts)
        guard = HfRepeatProcessor(self._guard, self._tokenizer, width, self._ends)
        device = self._model.device
        inputs = _padded(prompts, self._family.inputs)
        drawn_from = seed if config.temperature else None
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=drawn_from is not None):
            if drawn_from is not None:
                torch.manual_seed(drawn_from)
            rows: list[list[int]] = self._model.generate(  # type: ignore[operator]
                **{name: tensor.to(device) for name, tensor in inputs.items()},
                generation_config=self._decoding(config, max(rooms)),
                logits_processor=LogitsProcessorList([guard] if self._guard.enabled else []),
            ).tolist()
        outputs = []
        for index, (prompt, row, room) in enumerate(zip(prompts, rows, rooms, strict=True)):
            generated = row[width:][:room]
            end = next((i for i, token in enumerate(generated) if token in self._ends), None)
            ids = generated[:end]
            output = RolloutOutput(
                prompt_token_ids=prompt.ids.tolist(),
                response_token_ids=ids,
                text=str(self._tokenizer.decode(ids, skip_special_tokens=False)),
                finish_reason="length" if end is None else "stop",
                repeat_terminated=end is not None and guard.ended(ids),
                weights_version=(self.version.newest, self.version.newest),
                seed=None if seed is None else seed + index,
            )
            outputs.append(output)
        return outputs

    def _decoding(self, config: RequestConfig, max_new_tokens: int) -> GenerationConfig:
        sampling = {
            "do_sample": True,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": max(config.top_k or 0, 0),
            "min_p": config.min_p,
        }
        return GenerationConfig(
            **(sampling if config.temperature else {"do_sample": False}),
            max_new_tokens=max_new_tokens,
            repetition_penalty=config.repetition_penalty or 1.0,
            num_beams=self._num_beams,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
            use_cache=True,
        )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end an answer, as vLLM reads them; that of the tokenizer is first."""
    config = model.generation_config
    named = None if config is None else config.eos_token_id
    others = named if isinstance(named, list) else [] if named is None else [named]
    return list(dict.fromkeys([tokenizer.eos_token_id, *others]))


def _padded(prompts: Sequence[EncodedPrompt], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the inputs of one forward: B prompts of at most L ids -> (B, L), padded on the left.

    A row is padded with its own first id, which the attention mask hides: a repetition
    penalty looks at all ids, and must find none that the prompt does not have.
    names: of the tensors beside ids and mask that the model takes.
    """
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    mask = pad([torch.ones_like(prompt.ids) for prompt in prompts])
    first = torch.stack([prompt.ids[:1] for prompt in prompts])
    inputs = {
        "input_ids": torch.where(mask.bool(), pad([prompt.ids for prompt in prompts]), first),
        "attention_mask": mask,
        "mm_token_type_ids": pad([prompt.mm_token_types for prompt in prompts]),
    }
    for name in ("pixel_values", "image_grid_thw"):
        if images := [image for p in prompts if (image := getattr(p, name)) is not None]:
            inputs[name] = torch.cat(images)
    taken = ("input_ids", "attention_mask", *names)
    return {name: tensor for name, tensor in inputs.items() if name in taken}


@contextmanager
def _answering(model: PreTrainedModel) -> Iterator[None]:
    of_checkpoint, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with evaluating(model):
            yield
    finally:
        model.generation_config = of_checkpoint


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients; afterwards restore the mode of every module."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
