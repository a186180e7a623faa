import keras
import pytest

import kmp
from kmp.backend import functions_by_reference, with_named_lambda


def double(x):
    return 2 * x


@keras.saving.register_keras_serializable("tests")
def registered(x):
    return x


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
@pytest.mark.parametrize("function", [lambda x: x, double], ids=["lambda", "unregistered"])
def test_function_survives_serialization_as_the_same_object_in_safe_mode(function):
    with functions_by_reference() as functions:
        config, repeated = (keras.saving.serialize_keras_object(function) for _ in range(2))
    assert config == repeated
    assert list(functions.values()) == [function]
    assert keras.saving.deserialize_keras_object(with_named_lambda(config), custom_objects=functions) is function


@pytest.mark.parametrize("function", [keras.activations.relu, registered])
def test_function_of_keras_or_a_registered_one_keeps_its_name(function):
    with functions_by_reference() as functions:
        assert keras.saving.serialize_keras_object(function)["config"] in {"relu", "tests>registered"}
    assert functions == {}


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_code_of_a_lambda_is_serialized_again_after_an_error_in_the_context():
    with pytest.raises(RuntimeError), functions_by_reference():
        raise RuntimeError
    config = keras.saving.serialize_keras_object(lambda x: x)
    assert with_named_lambda(config) is config
    with pytest.raises(ValueError, match="deserialization of a Python lambda"):
        keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(double)["config"] == "double"


def test_function_without_a_module_is_a_reference():
    names = {}
    exec("def double(x):\n    return 2 * x", names)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation=names["double"])])
    assert kmp.convert(model).layers[0].activation is names["double"]
