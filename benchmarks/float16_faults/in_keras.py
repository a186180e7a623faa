"""Rewrites a program for Keras without kmp, as a user of Keras would have written it."""

import ast
import re
from collections.abc import Mapping

from float16_faults.editing import calls_of

# Arguments of `kmp.enable` and `kmp.wrap`, and those of Keras' LossScaleOptimizer.
_SCALE_ARGUMENTS = {"initial_scale": "initial_scale", "growth_interval": "dynamic_growth_steps"}
_LOSS_SCALE_OPTIMIZER = "keras.optimizers.LossScaleOptimizer"


def in_keras(source: str) -> str:
    """Returns a program that trains alike with Keras' dtype policies and its LossScaleOptimizer.

    Raises:
        ValueError: If it uses what only kmp has.
    """
    tree = ast.parse(source)
    scale: dict[str, ast.expr] = {}
    for call in calls_of(tree, "enable"):
        scale |= _scale_of(call)
        _set_policy(call)
    for call in calls_of(tree, "compile"):
        _scale_loss(call, scale)
    tree = ast.fix_missing_locations(_WithoutKmp().visit(tree))
    changed = ast.unparse(tree)
    if left := re.search(r"kmp\.\w+|\bunscale(?=\()|\bunscaled(?==)", changed):
        raise ValueError(f"Keras has no {left[0]}")
    return changed


def in_float32(source: str) -> str:
    """Returns a program for Keras with all 16-bit dtypes replaced by float32."""
    return re.sub(r"""(["'])(mixed_)?b?float16\1""", "'float32'", source)


class _WithoutKmp(ast.NodeTransformer):
    """Replaces the names of kmp, and a loss that Keras 3.15 cannot add to one in float32."""

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        self.generic_visit(node)
        is_guard = ast.unparse(node.items[0].context_expr).startswith("kmp.guard(")
        return node.body if is_guard else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) == "self.add_loss":
            node.args = [_expression(f"keras.ops.cast({ast.unparse(node.args[0])}, 'float32')")]
        if ast.unparse(node.func) != "kmp.wrap":
            return node
        scale = _scale_of(node)
        return node.args[0] if _is_one(scale) else _wrapped(node.args[0], scale)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        name = ast.unparse(node)
        if name.startswith("kmp.layers."):
            return _expression(f"keras.layers.{node.attr}")
        if name == "self.optimizer.loss_scale":
            return _expression("self.optimizer.scale_loss(1.0)")
        return node


def _expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _scale_of(call: ast.Call) -> dict[str, ast.expr]:
    """Returns the arguments about the loss scale."""
    return {each.arg: each.value for each in call.keywords if each.arg != "policy"}


def _is_one(scale: Mapping[str, ast.expr]) -> bool:
    return {name: ast.unparse(value) for name, value in scale.items()} == {"loss_scale": "1.0"}


def _set_policy(enable: ast.Call) -> None:
    policies = [each.value for each in enable.keywords if each.arg == "policy"]
    enable.func = _expression("keras.config.set_dtype_policy")
    enable.args = [*enable.args, *policies, ast.Constant("mixed_float16")][:1]
    enable.keywords = []


def _scale_loss(compile_: ast.Call, scale: Mapping[str, ast.expr]) -> None:
    """Gives `compile` the loss scale that `kmp.enable` set."""
    if _is_one(scale):
        compile_.keywords.append(ast.keyword("auto_scale_loss", ast.Constant(value=False)))
    elif scale:
        for keyword in compile_.keywords:
            if keyword.arg == "optimizer":
                keyword.value = _wrapped(keyword.value, scale)


def _wrapped(optimizer: ast.expr, scale: Mapping[str, ast.expr]) -> ast.expr:
    wrapped = _expression(f"{_LOSS_SCALE_OPTIMIZER}()")
    wrapped.args = [optimizer]
    for name, value in scale.items():
        if name not in _SCALE_ARGUMENTS:
            raise ValueError(f"Keras' LossScaleOptimizer has no {name}")
        wrapped.keywords.append(ast.keyword(_SCALE_ARGUMENTS[name], value))
    return wrapped
