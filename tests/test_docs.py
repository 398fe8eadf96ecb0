"""The documentation names what there is, all of it, and its links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import langgraph_pingpong
from langgraph_pingpong import errors, observe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE = Path(langgraph_pingpong.__file__).parent
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def names(each: Any) -> str:
    return each.name if isinstance(each, Path) else str(getattr(each, "__name__", each))


# -- pages -----------------------------------------------------------------------------------------------------


def test_troubleshooting_has_every_error_with_its_hint() -> None:
    own = [each for each in vars(errors).values() if inspect.isclass(each) and each.__module__ == errors.__name__]
    page = text_of(ROOT / "docs" / "troubleshooting.md").partition("## Errors")[2]
    sections = {title.strip(): body for title, body in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", page, re.M | re.S)}
    assert list(sections) == [each.__name__ for each in own]
    for each in own:
        hints = re.findall(r"^> (.*)$", sections[each.__name__], re.M)
        assert hints == ([vars(each)["hint"]] if vars(each).get("hint") else []), each
        assert len(sections[each.__name__]) > len(each.__doc__ or "") + 40, "it says no more than the class does"


def test_the_tree_of_errors_is_whole() -> None:
    own = {name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == errors.__name__}
    assert own <= set(re.findall(r"^[ │├└─]+(\w+)", errors.__doc__ or "", re.M))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in LINK.findall(text_of(page)):
        if place.startswith(("http://", "https://")):
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), place
        if anchor:
            assert anchor in anchors(text_of(target)), f"{place}#{anchor}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as a code host makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_programs_in_pages_use_names_that_exist(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of(page), re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("langgraph_pingpong"):
                module = __import__(str(node.module), fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names), block


def test_tracing_lists_every_metric() -> None:
    source = text_of(PACKAGE / "observe" / "metrics.py")
    kinds = re.findall(r'(Counter|Gauge|Histogram)\(\s*"(\w+)"', source)
    made = {f"{name}_total" if kind == "Counter" else name for kind, name in kinds}
    page = text_of(ROOT / "docs" / "tracing.md")
    assert set(re.findall(r"^\| `(pingpong_\w+)` \|", page, re.M)) == made
    assert len(made) == 6


# -- docstrings ------------------------------------------------------------------------------------------------

PUBLIC = [
    *(getattr(langgraph_pingpong, name) for name in langgraph_pingpong.__all__),
    *(getattr(observe, name) for name in observe.__all__),
]


@pytest.mark.parametrize("each", PUBLIC, ids=names)
def test_what_is_public_is_documented(each: Any) -> None:
    assert each.__doc__
    for name, member in members(each):
        assert (member.__doc__ or "").strip(), f"{each.__name__}.{name} has no docstring"


@pytest.mark.parametrize("each", [each for each in PUBLIC if inspect.isfunction(each)], ids=names)
def test_functions_say_what_each_argument_is(each: Any) -> None:
    for name in inspect.signature(each).parameters:
        assert re.search(rf"\b{name}\b", each.__doc__), f"{each.__name__} does not say what {name} is"


def members(each: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that classes of this package define."""
    if inspect.isclass(each):
        for owner in each.__mro__:
            if owner.__module__.startswith("langgraph_pingpong"):
                yield from ((name, it) for name, it in vars(owner).items() if is_public_member(name, it))


def is_public_member(name: str, member: Any) -> bool:
    return not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))


def test_every_setting_is_documented() -> None:
    (settings,) = (
        node
        for node in ast.walk(ast.parse(text_of(PACKAGE / "settings.py")))
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    documented = {
        field.target.id: isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for field, after in zip(settings.body, settings.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert [name for name, there in documented.items() if not there] == []
    assert set(documented) >= {"model", "devices", "base_urls", "overlap", "pool", "tokenizer"}
