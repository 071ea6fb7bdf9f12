"""Word problems of one step, made by code: sums, differences and products of small numbers.

They are for a small chat model that reads them without trouble and often gets the number wrong. A
pair of numbers is either trained or held out, so no held-out problem was ever trained with other
names. The split does not depend on a run's seed.
"""

import random

SPLIT_SEED = 2505
TRAINED, HELD_OUT = 3000, 240

TEMPLATES = {
    "sum": "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "difference": "{name} had {a} {things} and gave away {b}. How many {things} are left?",
    "product": "{name} packs {a} boxes with {b} {things} each. How many {things} is that?",
}
NAMES = ("Ada", "Ben", "Chloe", "Dan", "Emma", "Finn", "Grace", "Hugo")
THINGS = ("apples", "books", "cards", "coins", "cookies", "marbles", "pencils", "stickers")


def problems() -> list[dict[str, str]]:
    """Returns the 3,000 training rows, `{"question": ..., "answer": "85", "kind": "sum"}`."""
    return _rows(TRAINED, held_out=False)


def held_out() -> list[dict[str, str]]:
    """Returns 240 rows to report on, 80 of each kind; their pairs of numbers are never trained."""
    return _rows(HELD_OUT, held_out=True)


def _rows(number: int, held_out: bool) -> list[dict[str, str]]:
    rng = random.Random(SPLIT_SEED)
    pairs = {kind: _pairs(kind, held_out) for kind in TEMPLATES}
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < number:
        # Each kind in its turn; a question that is there already does not count.
        kind = list(TEMPLATES)[len(rows) % len(TEMPLATES)]
        a, b = rng.choice(pairs[kind])
        question = TEMPLATES[kind].format(
            a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS)
        )
        rows[question] = {"question": question, "answer": str(_answer(kind, a, b)), "kind": kind}
    return list(rows.values())


def _pairs(kind: str, held_out: bool) -> list[tuple[int, int]]:
    """Returns every fifth pair of a kind, in a fixed shuffled order, or the other four fifths."""
    pairs = [
        (a, b)
        for a in (range(3, 13) if kind == "product" else range(11, 90))
        for b in (range(2, 13) if kind == "product" else range(11, 90))
        if kind != "difference" or a > b
    ]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs[::5] if held_out else [pair for index, pair in enumerate(pairs) if index % 5]


def _answer(kind: str, a: int, b: int) -> int:
    return {"sum": a + b, "difference": a - b, "product": a * b}[kind]
