"""How much code there may be: see CONTRIBUTING.md."""

import pytest
from code_tokens import ROOMS, count, packed_share, sources_of

MOST = {"plain.py": 3_550, "main.py": 3_550, "engine": 59_000}
MOST_TOGETHER = 96_700


@pytest.mark.parametrize("room", MOST)
def test_a_room_has_at_most_so_many_code_tokens(room):
    assert sum(map(count, sources_of(room))) <= MOST[room]


def test_one_line_holds_one_idea():
    """Of all statements at most 1% assign one written-out tuple to another."""
    assert all(packed_share(sources_of(room)) <= 0.01 for room in MOST)


def test_all_rooms_together_have_at_most_so_many_code_tokens():
    assert sum(count(source) for room in ROOMS for source in sources_of(room)) <= MOST_TOGETHER


def test_what_counts_as_a_token_and_as_packed():
    source = '"""One."""\na = 1  # two\n"""Three."""\nb, c = f"{a} {a}", {1: 2}\nd, e = e, d\n'
    assert count(source) == 3 + 11 + 7  # an f-string is one token in every version of Python
    assert packed_share([source]) == 2 / 5
