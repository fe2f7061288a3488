"""Docstrings begin with a verb (functions, methods) or a head noun (modules, classes, properties, attributes)."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "winnow"
# Verbs that begin docstrings of functions. A new one is a word more.
VERBS = """
Abort Accept Accumulate Add Aggregate Allocate Announce Answer Append Apply Ask Assert Assign Attend Begin Bind
Bring Build Call Capture Catch Charge Check Choose Clear Close Collect Compare Compile Complete Compress Compute
Concatenate Continue Convert Copy Count Create Cut Decide Declare Decode Delete Describe Discard Divide Do Drain
Draw Drop Dump Embed Empty Encode End Ensure Enter Evaluate Evict Exclude Expect Extend Fill Find Fit Follow
Forget Fork Free Gather Get Give Group Hand Handle Help Hold Hook Insert Inspect Install Interpolate Keep Learn
Leave Lengthen Let List Load Log Look Lower Make Map Mark Measure Merge Minimize Move Norm Observe Offer Open Pack
Pad Park Parse Pass Plan Play Pool Predict Preempt Prefill Prepare Print Protect Put Quantize Queue Raise Rank
Read Reallocate Recompute Record Recover Redraw Reduce Refuse Release Remember Remove Replace Replay Reserve
Restore Resume Return Rotate Round Run Sample Save Say Score Search See Send Serve Set Settle Share Shift Show
Shrink Simulate Sort Split Stack Standardize Start Stop Store Submit Sum Summarise Take Talk Time Tokenise Turn
Unshare Update Wait Warm Warn Work Write Yield Zero
"""
# Words that begin no noun phrase: a docstring that begins so says of the thing without naming it.
NO_NOUN = """
As By From How In Is Lets Of On Over Per Their Those Too What When Where Whether Which While Who Whom Whose Why
"""


def described(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each module, class, function and attribute that has a docstring, with the docstring's first word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for before, after in pairwise(node.body):
                match before, after:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield before, text.split()[0].rstrip(".,:;")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words:
                yield node, words[0].rstrip(".,:;")


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def fault(node: ast.AST, word: str) -> str | None:
    """Return what is wrong with a docstring's first word; None: nothing."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
        return None if word in VERBS.split() else f"{word!r} is no verb"
    return f"{word!r} begins no noun" if word in NO_NOUN.split() else None


@pytest.mark.parametrize("part", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_first_words(part: str) -> None:
    root = SOURCE / part
    found = [
        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}: {message}"
        for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))
        for node, word in described(ast.parse(path.read_text(encoding="utf-8")))
        if (message := fault(node, word))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("def f():\n    '''Return it.'''", False),
        ("def f():\n    '''Whether it is.'''", True),
        ("def f():\n    '''The number.'''", True),
        ("class A:\n    '''What it holds.'''", True),
        ("class A:\n    '''Number.'''\n    @property\n    def b(self):\n        '''Of both.'''", True),
        ("class A:\n    @property\n    def b(self):\n        '''Bytes of both.'''", False),
        ("class A:\n    b = 1\n    '''Of both.'''", True),
        ("class A:\n    b: int\n    '''Bytes of both.'''", False),
        ("'''How it works.'''", True),
    ],
)
def test_a_fault_is_found(source: str, faulty: bool) -> None:
    assert any(fault(*each) for each in described(ast.parse(source))) == faulty
