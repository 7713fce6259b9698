"""Coverage-guided fuzzing of the strict parsers of all formats and of what is built on them.

    .venv/bin/python tests/fuzz/parser.py -runs=20000
    .venv/bin/python tests/fuzz/parser.py -max_total_time=300 CORPUS_FOLDER

Options are libFuzzer's. Bytes become the ids of an answer, either from fragments of answers or
as they are; no parser may raise, what it finds must agree with the ids or with a second reader, and
a target made of it must read back. A failure prints its traceback and leaves the bytes in
`crash-*`; give that file in place of the options to see it again.
"""

import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["learner"]):
    from learner.stages.formats import AnswerFormat
    from learner.stages.formats.compact import COMPACT
    from learner.stages.formats.coord_json import COORD_JSON
    from learner.stages.formats.objects_array import OBJECTS_ARRAY
    from tests.unit.answers import BIRD, CAT, FRAGMENTS, ROOF, encode, entry, text_of
    from tests.unit.format_readers import LINE_FRAGMENTS, LIST_FRAGMENTS, check_lines, check_list
    from tests.unit.parse_invariants import check_parsed
    from tests.unit.toy_bpe import train_toy_tokenizer

from learner.stages.tokens import token_table
from learner.types import FieldOrder, GroundTruthObject

TOKENIZER = train_toy_tokenizer()
ALL_FRAGMENTS = [*FRAGMENTS, *LIST_FRAGMENTS, *LINE_FRAGMENTS]
PARTS = [encode(TOKENIZER, part) for part in ALL_FRAGMENTS]
TRUTHS = (CAT, ROOF, BIRD, GroundTruthObject("toy 🚀", CAT.shape))

# The first byte selects how the others are read. LOWEST_ID is below the vocabulary.
FROM_FRAGMENTS, AS_IDS = 0, 1
WITHOUT_POLYGONS = 128
LOWEST_ID = -1


def read_ids(data: bytes) -> list[int]:
    """A fragment for each byte (the highest one takes an id back), or an id for every two."""
    if data[0] % 2 == AS_IDS:
        pairs = zip(data[1::2], data[2::2], strict=False)
        return [low + 256 * high + LOWEST_ID for low, high in pairs]
    ids: list[int] = []
    for byte in data[1:]:
        ids = ids[:-1] if byte == 255 else ids + PARTS[byte % len(PARTS)]
    return ids


def write_ids(ids: list[int]) -> bytes:
    """Bytes that `read_ids` reads as these ids."""
    return bytes([AS_IDS]) + b"".join((i - LOWEST_ID).to_bytes(2, "little") for i in ids)


def one_input(data: bytes) -> None:
    if not data:
        return
    ids = read_ids(data)
    allow_poly = data[0] < WITHOUT_POLYGONS
    parsed = COORD_JSON.parse(ids, TOKENIZER, allow_poly=allow_poly)
    assert COORD_JSON.parse(ids, TOKENIZER, allow_poly=allow_poly) == parsed
    check_parsed(ids, parsed, TOKENIZER)
    known = [token_id for token_id in ids if 0 <= token_id < len(TOKENIZER)]
    listed = OBJECTS_ARRAY.parse(known, TOKENIZER, allow_poly=allow_poly)
    check_list(known, listed, TOKENIZER, allow_poly)
    lines = COMPACT.parse(known, TOKENIZER, allow_poly=allow_poly)
    check_lines(known, lines, TOKENIZER, allow_poly)
    missed = list(TRUTHS[: data[0] // 2 % (len(TRUTHS) + 1)])
    order: FieldOrder = "geometry_first" if data[0] & 64 else "desc_first"
    for answers in (COORD_JSON, OBJECTS_ARRAY, COMPACT):
        check_continued(answers, known, missed, order)


def check_continued(
    answers: AnswerFormat, ids: list[int], missed: list[GroundTruthObject], order: FieldOrder
) -> None:
    """The prefix, with objects appended, reads back as what it had and those."""
    parsed = answers.parse(ids, TOKENIZER)
    prefix = parsed.prefix_token_ids
    more = answers.append(text_of(TOKENIZER, prefix), missed, parsed.max_object_index + 1, order)
    end_id = token_table(TOKENIZER).vocab.end_id
    found = answers.read_back([*prefix, *encode(TOKENIZER, more), end_id], TOKENIZER)
    assert found is not None
    said = [(each.desc, each.shape) for each in found.parsed.objects]
    before = [(each.desc, each.shape) for each in parsed.objects]
    assert said == before + [(each.desc, each.shape) for each in missed]


def write_seeds(folder: Path) -> None:
    """Whole answers to start from, and every fragment alone behind a brace or a list."""
    texts = [COORD_JSON.write(TRUTHS[:n], "desc_first") for n in range(5)]
    texts += [COORD_JSON.write(TRUTHS[:n], "geometry_first") for n in range(1, 5)]
    texts += ["{" + part + ", " + entry(1) + "}" for part in FRAGMENTS]
    for answers in (OBJECTS_ARRAY, COMPACT):
        texts += [answers.write(TRUTHS[:n], "desc_first") for n in range(5)]
    texts += [f'{{"objects":[{LIST_FRAGMENTS[0]},{part},' for part in LIST_FRAGMENTS]
    for i, text in enumerate(texts):
        (folder / f"ids_{i}").write_bytes(write_ids(encode(TOKENIZER, text)))
    brace = FRAGMENTS.index("{")
    for i in range(len(ALL_FRAGMENTS)):
        for first in (FROM_FRAGMENTS, FROM_FRAGMENTS + WITHOUT_POLYGONS):
            (folder / f"fragments_{first}_{i}").write_bytes(bytes([first, brace, i, i]))


def fuzz(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as seeds:
        write_seeds(Path(seeds))
        again = any(Path(option).is_file() for option in options)
        corpus = [] if again else [seeds]
        atheris.Setup([sys.argv[0], "-max_len=400", *options, *corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    fuzz(sys.argv[1:])
