"""Each patch is applied while it has a reason, and a missing name costs its promise only."""

import gc
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import another_thread
from packaging.version import Version
from tensorflow.python.autograph.impl import conversion

import kmp
from kmp.backend import patching, private_names
from kmp.backend.inventory import PATCHES, PRIVATE_NAMES, Patch, Reason
from kmp.backend.patching import Patches, patches

ROOT = Path(__file__).parent.parent.parent
UPSTREAM = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", Reason)
def test_installed_versions_have_what_is_patched(reason):
    with patches.holding(reason):
        applied = patches.applied()
    assert [patch.name for patch in PATCHES if reason in patch.when and patch not in applied] == []


def test_installed_versions_have_the_private_functions():
    """Of the others, attributes of instances, the next test warns."""
    for name in PRIVATE_NAMES:
        if not name.where.startswith(("keras:", "tensorflow:Tensor", "tensorflow:types")):
            assert private_names.resolve(name.where) is not None


def test_installed_versions_have_the_private_attributes(monkeypatch):
    monkeypatch.setattr(private_names, "_warned", set())
    assert np.isfinite(train_and_convert())
    assert private_names._warned == set()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_is_for_the_installed_version(patch):
    package, since = patch.since.split()
    installed = Version({"Keras": keras, "TensorFlow": tf}[package].__version__)
    assert installed >= Version(since)
    assert patch.until is None or installed < Version(patch.until), "remove the patch"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_names_the_heading_that_says_what_would_end_it(patch):
    assert re.search(rf"(?m)^### {re.escape(patch.link)}$", UPSTREAM)


WHEN = {
    Reason.ENABLED: "enabled",
    Reason.IN_USE: "in use",
    Reason.CONVERSION: "conversion",
    Reason.STEP: "step",
    Reason.REPLAY: "replay",
}


def documented_table():
    """The table of patches, as docs/upstream.md has it."""
    lines = ["| replaced | when | what needs it |", "| --- | --- | --- |"]
    for patch in PATCHES:
        owner = patch.owner.replace(":", ".").split(".")
        name = ".".join([*owner[:1], *owner[-1:]] if len(owner) > 2 else owner)
        when = ", ".join(WHEN[reason] for reason in patch.when)
        anchor = re.sub(r"[^a-z0-9 -]", "", patch.link.lower()).replace(" ", "-")
        lines.append(f"| `{name}.{patch.name}` | {when} | [{patch.promise}](#{anchor}) |")
    lines += ["", *(f"- **{name}**: {reason.value}." for reason, name in WHEN.items())]
    return "\n".join(lines)


def test_page_has_the_table_of_patches():
    table = documented_table()
    assert table in UPSTREAM, f"replace the table of docs/upstream.md by this:\n{table}"


class Owner:
    def double(self):
        return 2


def doubled(original):
    return lambda self: original(self) * 2


def row_of(owner):
    """A patch of one method, for two reasons, whose replacement is in this module."""
    return Patch(
        owner=f"{__name__}:{owner.__name__}",
        name="double",
        make=f"{__name__}:doubled",
        when=(Reason.ENABLED, Reason.CONVERSION),
        promise="it doubles",
    )


@pytest.fixture
def table():
    original = Owner.double
    yield Patches([row_of(Owner)])
    Owner.double = original


def test_patch_is_applied_from_the_first_reason_to_the_last(table):
    first, second = object(), object()
    table.hold(Reason.ENABLED, first)
    table.hold(Reason.ENABLED, first)
    table.hold(Reason.CONVERSION, second)
    assert Owner().double() == 4
    table.release(Reason.ENABLED, first)
    assert Owner().double() == 4
    table.release(Reason.CONVERSION, second)
    table.release(Reason.CONVERSION, second)
    assert (Owner().double(), table.applied()) == (2, [])


class Interrupting(type):
    interrupts: ClassVar = []

    def __setattr__(cls, name, value):
        if Interrupting.interrupts:
            raise Interrupting.interrupts.pop()
        super().__setattr__(name, value)


class Interrupted(metaclass=Interrupting):
    def double(self):
        return 2


def test_patch_whose_application_is_interrupted_is_applied_by_the_next_reason():
    table = Patches([row_of(Interrupted)])
    Interrupting.interrupts.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        table.hold(Reason.ENABLED, "first")
    assert (Interrupted().double(), table.applied()) == (2, [])
    with table.holding(Reason.CONVERSION):
        assert (Interrupted().double(), len(table.applied())) == (4, 1)
    table.release(Reason.ENABLED, "first")
    assert (Interrupted().double(), table.applied()) == (2, [])


def test_patch_that_another_library_wraps_is_left_and_used_again(table):
    with table.holding(Reason.ENABLED):
        inner = Owner.double
        Owner.double = wrapper = lambda self: inner(self) + 1
    for _ in range(2):
        assert (Owner.double, table.applied()) == (wrapper, [])
        with table.holding(Reason.ENABLED):
            assert Owner().double() == 5  # not doubled twice


def test_autograph_does_not_convert_a_replacement():
    with patches.holding(Reason.REPLAY), patches.holding(Reason.STEP):
        functions = [tf.GradientTape().gradient, keras.Variable(0.0).assign, tf.random.uniform]
        assert all(map(conversion.is_allowlisted, functions))
    assert not conversion.is_allowlisted(kmp.wrap)  # what is no function of Keras or TensorFlow


def test_patches_of_what_is_in_use_stay_until_it_is_gone():
    table = Patches([])
    one, two = types.SimpleNamespace(), type("Used", (), {})()
    with pytest.raises(TypeError):
        table.use(one)  # not hashable
    table.use(two)
    table.release_unused()
    assert table.is_held(Reason.IN_USE)
    del two
    gc.collect()
    table.release_unused()
    assert not table.is_held(Reason.IN_USE)


X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def train_and_convert(has_callbacks=True):
    """Uses kmp as a small program does, and returns the loss."""
    callbacks = kmp.callbacks.defaults() if has_callbacks else []
    with kmp.enable():
        norm = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1, dtype="float32")])
        model.compile("adam", "mse", run_eagerly=True, metrics=["mae"])
        history = model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)
    inputs = keras.Input((4,))
    kmp.convert(keras.Model(inputs, keras.ops.softmax(keras.layers.Dense(2)(inputs))))
    return history.history["loss"][0]


allowed = pytest.mark.filterwarnings("default:.*which this version of kmp uses:UserWarning")

# What `convert` cannot do without, as there is no public name for the calls in a graph.
NEEDED_BY_CONVERT = (
    "keras:Operation._inbound_nodes",
    "keras:KerasTensor._keras_history",
    "keras:Model._run_through_graph",
)


def hide(monkeypatch, names):
    """Makes kmp, not Keras and TensorFlow, miss names."""
    resolve = private_names.resolve

    def resolved(dotted):
        if dotted in names:
            raise AttributeError(dotted)
        return resolve(dotted)

    attributes = {name.rpartition(".")[2] for name in names}

    def found(instance, name, *default):
        if default and name in attributes:
            return default[0]
        return getattr(instance, name, *default)

    monkeypatch.setattr(private_names, "resolve", resolved)
    monkeypatch.setattr(private_names, "getattr", found, raising=False)
    monkeypatch.setattr(private_names, "_warned", set())


def missing_names(recwarn):
    """The names that kmp has warned about."""
    messages = [str(warning.message) for warning in recwarn]
    found = [re.match(r"Keras .* has no (\S+), which this version", each) for each in messages]
    return [match[1] for match in found if match]


@allowed
def test_without_all_private_names_that_it_reads_kmp_trains(monkeypatch, recwarn):
    names = {name.where for name in PRIVATE_NAMES} - set(NEEDED_BY_CONVERT)
    hide(monkeypatch, names)
    assert np.isfinite(train_and_convert())
    warned = missing_names(recwarn)
    assert len(warned) == len(set(warned)) >= 10
    assert set(warned) <= names


@allowed
def test_without_the_state_of_the_policy_enable_sets_that_of_the_thread(monkeypatch, recwarn):
    defining_class = patching._defining_class

    def without(owner, patch):
        if patch.name.endswith("_global_attribute"):
            raise AttributeError(patch.name)
        return defining_class(owner, patch)

    def policy():
        return keras.config.dtype_policy().name

    monkeypatch.setattr(patching, "_defining_class", without)
    monkeypatch.setattr(private_names, "_warned", set())
    with another_thread() as call:
        with kmp.enable("mixed_bfloat16"), kmp.enable():
            assert (policy(), call(policy)) == ("mixed_float16", "float32")
        assert (policy(), call(policy)) == ("float32", "float32")
    assert len(missing_names(recwarn)) == 2


@allowed
@pytest.mark.parametrize("name", NEEDED_BY_CONVERT)
def test_without_the_names_of_a_graph_convert_raises_an_error(monkeypatch, recwarn, name):
    hide(monkeypatch, {name})
    with pytest.raises((RuntimeError, ValueError), match="kmp knows no other way.*Update kmp"):
        train_and_convert()


@pytest.mark.exhaustive
@allowed
@pytest.mark.parametrize(
    "name", [each.where for each in PRIVATE_NAMES if each.where not in NEEDED_BY_CONVERT]
)
def test_a_missing_name_costs_its_promise_only(monkeypatch, recwarn, name):
    hide(monkeypatch, {name})
    assert np.isfinite(train_and_convert())
    attribute = re.split(r"[.:]", name)[-1]  # two classes may have one of this name
    assert all(re.split(r"[.:]", each)[-1] == attribute for each in missing_names(recwarn))


# In CI: of those that are applied at other times.
IN_CI = ("compile", "assign", "get_global_attribute", "_internal_operation_seed")


@allowed
@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(
            patch, id=patch.name, marks=() if patch.name in IN_CI else pytest.mark.exhaustive
        )
        for patch in PATCHES
    ],
)
def test_a_missing_function_costs_the_promise_of_its_patch_only(monkeypatch, recwarn, patch):
    gc.collect()
    patches.release_unused()
    if patch in patches.applied():
        pytest.skip("a model of another test needs it")
    defining_class = patching._defining_class

    def without(owner, each):
        if each == patch:
            raise AttributeError(each.name)
        return defining_class(owner, each)

    monkeypatch.setattr(patching, "_defining_class", without)
    monkeypatch.setattr(private_names, "_warned", set())
    with patches.holding(patch.when[0]):
        # Without `compile`, no optimizer is wrapped, and the callbacks say that they need that.
        assert np.isfinite(train_and_convert(has_callbacks=patch.name != "compile"))
    assert missing_names(recwarn) == [f"{patch.owner}.{patch.name}"]


IMPORT = """
import keras, tensorflow as tf, numpy as np
from kmp.backend.inventory import PATCHES
from kmp.backend.patching import patches
import kmp
assert patches.applied() == [], patches.applied()
with kmp.enable():
    layers = [keras.layers.Embedding(6000, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
assert patches.applied()
model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
del model, layers
keras.backend.clear_session()
import gc; gc.collect()
kmp.disable()
assert patches.applied() == [], patches.applied()
"""


@pytest.mark.slow
def test_import_patches_nothing_and_disable_removes_all_that_no_model_needs():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
