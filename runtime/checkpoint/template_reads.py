"""What a chat template reads from outside: names that nothing in it has certainly set where they are read.

Jinja's own look (`meta.find_undeclared_variables`) also names what an `if` and its `else` both set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jinja2 import nodes

_INSIDE = frozenset({"loop", "caller", "varargs", "kwargs"})  # Jinja sets them in loops and macros


def names_read(template: nodes.Template) -> frozenset[str]:
    """Names that whoever renders the template may give, built-in functions and filters among them."""
    read: set[str] = set()
    _walk(template.body, frozenset(), read)
    return frozenset(read)


def _walk(found: Iterable[nodes.Node], known: frozenset[str], read: set[str]) -> frozenset[str]:
    """Adds to `read` what is read before it is in `known`. Returns what is certainly set behind all of them."""
    for node in found:
        known = _step(node, known, read)
    return known


def _step(node: nodes.Node, known: frozenset[str], read: set[str]) -> frozenset[str]:
    match node:
        case nodes.Name(ctx="load") if node.name not in known:
            read.add(node.name)
        case nodes.Assign():
            return _walk((node.node,), known, read) | _targets([node.target])
        case nodes.AssignBlock():
            _walk(node.body, known, read)
            return known | _targets([node.target])
        case nodes.If():
            known = _walk((node.test,), known, read)
            branches = [_walk(node.body, known, read)]
            for other in node.elif_:
                _walk((other.test,), known, read)
                branches.append(_walk(other.body, known, read))
            return frozenset.intersection(*branches, _walk(node.else_, known, read))
        case nodes.For():
            _walk((node.iter,), known, read)
            inside = known | _targets([node.target]) | _INSIDE
            _walk((node.test,) if node.test is not None else (), inside, read)
            _walk(node.body, inside, read)
            _walk(node.else_, known, read)
        case nodes.Macro() | nodes.CallBlock():
            _walk(node.defaults, known, read)
            if isinstance(node, nodes.CallBlock):
                _walk((node.call,), known, read)
            itself = {node.name} if isinstance(node, nodes.Macro) else set()
            _walk(node.body, known | _targets(node.args) | itself | _INSIDE, read)
            return known | itself
        case nodes.With():
            _walk(node.values, known, read)
            _walk(node.body, known | _targets(node.targets), read)
        case _:
            return _walk(node.iter_child_nodes(), known, read)
    return known


def _targets(found: Sequence[nodes.Node]) -> frozenset[str]:
    """The names that these set: of `a, b` two, of `namespace.a` none."""
    return frozenset(
        name.name for node in found for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)
    )
