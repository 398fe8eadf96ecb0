"""Briefs: whole sentences, the asked length, another text for every role."""

import re
from importlib.resources import files
from itertools import pairwise

import pytest

from graphs.briefs import FIRST_REFERENCE, MIN_TOKENS, ROLES, brief, read_text

LENGTHS = (MIN_TOKENS, 300, 768, 2000, 4096, 8000)
DOCUMENTS = (
    "document.md",
    "documents/bakery_oven.md",
    "documents/clinic_telephone.md",
    "documents/river_gauge.md",
    "documents/school_bicycles.md",
)


def count(text: str) -> int:
    return len(text.split()) * 4 // 3


def held(role: str) -> int:
    """The length of the longest brief, as the refusal of an absurd one tells it."""
    with pytest.raises(ValueError, match=r"hold \d+ tokens") as refused:
        brief(role, 10**9, count)
    return int(str(refused.value).split(" hold ")[1].split()[0])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_reaches_the_length_with_its_last_sentence(role: str, tokens: int) -> None:
    text = brief(role, tokens, count)
    ends = [match.end() for match in re.finditer(r"""[.!?]["')]*(?=\s|\Z)""", text)]
    assert ends[-1] == len(text)
    assert count(text) >= tokens
    assert count(text[: ends[-2]]) < tokens


def test_does_not_end_after_a_quotation_inside_a_sentence() -> None:
    whole = brief("planner", held("planner"), count)
    quoted = '"Website!!"'
    upto = whole[: whole.index(quoted) + len(quoted)]
    assert brief("planner", count(upto), count).endswith("to the person who wrote it down.")


@pytest.mark.parametrize("role", ROLES)
def test_a_longer_brief_begins_with_the_shorter_one(role: str) -> None:
    briefs = [brief(role, tokens, count) for tokens in LENGTHS]
    assert all(long.startswith(short) for short, long in pairwise(briefs))
    assert briefs[0].startswith(f"# {role.title()}'s handbook\n")


@pytest.mark.parametrize("role", ROLES)
def test_extends_the_handbook_by_the_role_s_own_reference_text(role: str) -> None:
    handbook, reference = read_text(f"{role}.md").strip(), read_text(f"reference/{FIRST_REFERENCE[role]}.md")
    text = brief(role, count(handbook) + 200, count)
    assert text.startswith(handbook)
    extension = text.removeprefix(handbook).strip()
    assert reference.startswith(extension)
    assert count(extension) >= 200 - 1


def test_roles_differ_from_the_first_letter_of_the_heading_on() -> None:
    assert len({brief(role, MIN_TOKENS, count)[:3] for role in ROLES}) == len(ROLES)


def test_roles_read_different_reference_texts_first() -> None:
    assert len(set(FIRST_REFERENCE.values())) == len(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_the_longest_brief_holds_every_reference_text_whole(role: str) -> None:
    text = brief(role, held(role), count)
    references = sorted(files("graphs").joinpath("texts", "reference").iterdir(), key=lambda entry: entry.name)
    assert len(references) >= len(ROLES)
    assert all(entry.read_text(encoding="utf-8").strip() in text for entry in references)


def test_counts_few_texts() -> None:
    counted: list[str] = []

    def counting(text: str) -> int:
        counted.append(text)
        return count(text)

    brief("critic", 4096, counting)
    assert len(counted) <= 12


def test_the_same_call_gives_the_same_brief() -> None:
    assert brief("writer", 1500, count) == brief("writer", 1500, count)


@pytest.mark.parametrize("tokens", [MIN_TOKENS - 1, 0, -5])
def test_refuses_a_length_without_content(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"at least 50 tokens; {tokens} were asked for"):
        brief("planner", tokens, count)


@pytest.mark.parametrize("role", ROLES)
def test_refuses_one_token_more_than_the_texts_hold(role: str) -> None:
    most = held(role)
    assert count(brief(role, most, count)) == most
    with pytest.raises(ValueError, match=f"texts for the {role} hold {most} tokens; ask for no more"):
        brief(role, most + 1, count)


def test_refuses_an_unknown_role_and_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no role 'judge'; use one of researcher, analyst, critic"):
        brief("judge", 500, count)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_documents_are_there_to_be_worked_on(path: str) -> None:
    shortest = 850 if path == "document.md" else 150
    assert len(read_text(path).split()) >= shortest


def test_reading_an_unknown_text_names_it() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.md"):
        read_text("documents/nothing.md")
