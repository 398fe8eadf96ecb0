"""A picture of a graph as the text of a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from langgraph_pingpong.edges.known import Source
from langgraph_pingpong.viz.graph_parts import Node, Picture
from langgraph_pingpong.viz.graph_style import EDGES, INK, NODE_FILL, NODE_RIM

_ENTITIES = {char: f"#{ord(char)};" for char in '#"<>`&[]{}()|\\;'}


def mermaid(picture: Picture) -> str:
    """The flowchart, with a legend. Edges keep their order, which Mermaid styles them by."""
    ids = {name: f"n{number}" for number, name in enumerate(picture.nodes)}
    styled = [*((edge.prompt_source, edge.conditional) for edge in picture.edges)]
    styled += [(source, conditional) for source, conditional, _ in picture.legend]
    lines = [
        "flowchart TD",
        *_nodes(picture, ids, "", 1),
        *(
            f"    {ids[edge.source]} {_arrow(edge.prompt_source, edge.conditional, edge.lines)} {ids[edge.target]}"
            for edge in picture.edges
        ),
        *_legend(picture),
        *(f"    linkStyle {number} {_style(*kind)}" for number, kind in enumerate(styled)),
        f"    classDef node_ fill:{NODE_FILL},stroke:{NODE_RIM},color:{INK}",
        f"    classDef end_ fill:{NODE_RIM},stroke:{NODE_RIM},color:#ffffff",
        "    classDef none_ fill:none,stroke:none",
    ]
    return "\n".join(lines) + "\n"


def _nodes(picture: Picture, ids: dict[str, str], prefix: str, depth: int) -> Iterator[str]:
    """The nodes of a level, and the subgraphs within it."""
    indent, inner = "    " * depth, dict[str, None]()
    for name, node in picture.nodes.items():
        rest = name[len(prefix) :]
        if not name.startswith(prefix):
            continue
        if ":" in rest:
            inner[rest.partition(":")[0]] = None
        else:
            yield f"{indent}{ids[name]}{_shape(node)}"
    for title in inner:
        first = next(ids[name] for name in picture.nodes if name.startswith(f"{prefix}{title}:"))
        yield f'{indent}subgraph s{depth}_{first} ["{_text(title)}"]'
        yield from _nodes(picture, ids, f"{prefix}{title}:", depth + 1)
        yield f"{indent}end"


def _shape(node: Node) -> str:
    if node.is_end:
        return f'(["{_text(node.title)}"]):::end_'
    where = f"<br/><small>{_text(node.where)}</small>" if node.where else ""
    return f'("{_text(node.title)}{where}"):::node_'


def _arrow(source: Source | None, conditional: bool, lines: Sequence[str]) -> str:
    line = "-.->" if conditional else "==>" if source else "-->"
    return f'{line}|"{"<br/>".join(map(_text, lines))}"|' if lines else line


def _style(source: Source | None, conditional: bool) -> str:
    style = EDGES[source]
    dashes = ",stroke-dasharray:6 4" if conditional else ""
    return f"stroke:{style.colour},stroke-width:{style.width:g}px{dashes}"


def _legend(picture: Picture) -> Iterator[str]:
    yield '    subgraph legend ["edges"]'
    yield "        direction LR"
    for number, (source, conditional, text) in enumerate(picture.legend):
        arrow = _arrow(source, conditional, [text])
        yield f'        a{number}[" "]:::none_ {arrow} b{number}[" "]:::none_'
    yield "    end"


def _text(text: str) -> str:
    """Text that Mermaid takes for nothing else."""
    return "".join(_ENTITIES.get(char, char) for char in text)
