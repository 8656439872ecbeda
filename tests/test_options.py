"""No option is accepted and then forgotten: what a caller may pass is read somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dilated_attention_pytorch

PACKAGE = Path(dilated_attention_pytorch.__file__).parent
TREES = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}

# Parameters of no effect, each with the reason that callers are told.
WITHOUT_EFFECT = {
    "nn/multihead.py forward average_attn_weights": "there are no weights to average; PyTorch's modules pass it",
    "ops/device.py forward is_prepared": "its kernels read any rows, so there is nothing to prepare",
    "parent.py end_worker_with_trainer worker": "PyTorch's own signature of a worker_init_fn",
    "integrations/sparse_models/longformer.py __init__ config": "one signature of all replaced layers",
    "integrations/sparse_models/long_t5.py __init__ config": "one signature of all replaced layers",
    "integrations/sparse_models/longformer.py forward attention_mask": "the replaced layer's own signature",
    "integrations/sparse_models/pegasus_x.py forward options": "the replaced layer's own signature",
    "integrations/transformers/mask.py documents_mask allow_is_causal_skip": "transformers' own signature",
    "integrations/transformers/mask.py documents_mask dtype": "transformers' own signature",
}


def parameters(function: ast.FunctionDef) -> list[str]:
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    names += [arg.arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [name for name in names if name not in ("self", "cls", "ctx") and not name.startswith("_")]


def is_declaration(function: ast.FunctionDef) -> bool:
    """Only a docstring, or a refusal: there is nothing that could read."""
    return all(
        isinstance(statement, ast.Raise)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in function.body
    )


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of modules, constructors and forwards: what is called with options."""
    for file, tree in TREES.items():
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                functions += [
                    method
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "forward")
                ]
        for function in functions:
            if (not function.name.startswith("_") or function.name == "__init__") and not is_declaration(function):
                yield file, function


def test_every_parameter_of_a_public_callable_is_read() -> None:
    unread = set()
    for file, function in public_functions():
        read = {
            node.id
            for statement in function.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        unread |= {f"{file} {function.name} {name}" for name in parameters(function) if name not in read}
    assert unread <= set(WITHOUT_EFFECT)


def is_settings(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list) and node.name.endswith(
        ("Config", "Settings", "Options")
    )


def test_what_a_constructor_keeps_and_what_a_configuration_holds_is_read() -> None:
    loaded = {
        node.attr
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            kept = {
                target.attr
                for method in node.body
                if isinstance(method, ast.FunctionDef) and method.name == "__init__"
                for target in ast.walk(method)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            # The fields of core/config.py are the keywords of modules: tests/core/test_configurations.py.
            if is_settings(node) and file != "core/config.py":
                kept |= {
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
            unread |= {f"{file} {node.name} {name}" for name in kept if name[0] != "_" and name not in loaded}
    assert not unread
