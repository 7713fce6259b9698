"""A real byte-level BPE, trained in a second on detection answers.

It has the 1000 coordinate tokens and `<|im_end|>`, and merges that cross the structure of
an answer, such as `"]},`, `"]}}` and `!"}}`. The emoji of the corpus share their first two
bytes and their last one, so that their tokens hold parts of a character, some of them
together with the quote and the brace after it.
"""

import json
import random
import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.coord_json import serialize_objects
from learner.stages.tokens import COORD_BINS, IM_END, coord_token
from learner.types import FieldOrder, GroundTruthObject, Shape

NOUNS = ("cat", "dog", "red square", "stop!", "(car)", 'the "old" door', "chat noir", "猫")
EMOJI = "😀🙀🚀🛀🌀🍀🎀🏀🐀👀"


def train_toy_tokenizer(vocab_size: int = 600) -> PreTrainedTokenizerFast:
    """Train it; always the same one. `vocab_size` leaves the coordinate tokens out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    coords = [coord_token(k) for k in range(COORD_BINS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens(coords)
    tokenizer.add_special_tokens([IM_END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END)


def _corpus() -> list[str]:
    rng = random.Random(7)
    orders: tuple[FieldOrder, ...] = ("desc_first", "geometry_first")
    texts = []
    for _ in range(400):
        objects = [_random_object(rng) for _ in range(rng.randrange(6))]
        order = rng.choice(orders)
        text = serialize_objects(objects, order)
        compact = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        for answer in (text, compact):
            texts += re.split(r"<\|coord_[0-9]+\|>", answer)
    return texts


def _random_object(rng: random.Random) -> GroundTruthObject:
    corners = sorted(rng.randrange(COORD_BINS) for _ in range(4))
    desc = rng.choice((*NOUNS, f"toy {rng.choice(EMOJI)}"))
    return GroundTruthObject(desc, Shape("bbox_2d", tuple(corners)))
