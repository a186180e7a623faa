"""What kmp replaces of Keras and TensorFlow, and which of their private names it uses."""

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why a patch is applied."""

    ENABLED = "while `kmp.enable` or `kmp.graph_rewrite` is on"
    IN_USE = "while an optimizer of kmp, or what was made under `kmp.enable`, is in use"
    CONVERSION = "while `kmp.convert` builds layers"
    STEP = "while a guarded training step is traced or runs eagerly"
    REPLAY = "while a replay, audit or conversion traces code or runs a batch, in that thread only"


@dataclass(frozen=True)
class Patch:
    """A function or attribute of Keras or TensorFlow that kmp replaces.

    Args:
        owner: The module, or the class, as `"module:Class"`. A base class may define the name.
        name: Its name there.
        make: The function of kmp that returns the replacement of the original, as
            `"module:function"`.
        when: The reasons to apply it; one is enough.
        promise: What the user loses without it.
        since: The oldest version that it was tested with.
        until: The version that makes it needless; `None` if there is none yet.
        link: The heading in docs/upstream.md that says what would end it.
        is_new: Whether the owner has no attribute of this name without the patch.
    """

    owner: str
    name: str
    make: str
    when: tuple[Reason, ...]
    promise: str
    since: str = "Keras 3.12"
    until: str | None = None
    link: str = ""
    is_new: bool = False


_PATCHES = "kmp.enabling.keras_patches"
_INDICES = "kmp.enabling.exact_indices"
_PLAIN_STATE = "kmp.optimizer.plain_state"
_FIXES = "kmp.backend.trainer_fixes"
_INTERNALS = "kmp.backend.tensorflow_internals"
_PROMOTION = "kmp.backend.promotion"
_COMPILED = "kmp.layers.compiled_functions"

_WORKERS = "`fit` fails under MultiWorkerMirroredStrategy with several workers"
_NEEDED_BY_REPLAY = "What a replay needs by thread"

# `keras.Layer.__init__` has run before these classes set what their reason depends on.
_NEED_THEIR_ARGUMENTS = (
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "DepthwiseConv1D",
    "DepthwiseConv2D",
    "Dot",
    "Masking",
    "SeparableConv1D",
    "SeparableConv2D",
    "SpectralNormalization",
    "UpSampling2D",
)

PATCHES = (
    # While kmp is enabled.
    Patch(
        owner="keras.src.backend.common.global_state",
        name="get_global_attribute",
        make=f"{_PATCHES}:policy_read_patch",
        when=(Reason.ENABLED,),
        promise="the policy of `enable` holds in all threads and after `clear_session`",
        link="The global dtype policy belongs to a thread",
    ),
    Patch(
        owner="keras.src.backend.common.global_state",
        name="set_global_attribute",
        make=f"{_PATCHES}:policy_write_patch",
        when=(Reason.ENABLED,),
        promise="a policy that a thread sets under `enable` takes precedence there",
        link="The global dtype policy belongs to a thread",
    ),
    Patch(
        owner="keras:Model",
        name="compile",
        make=f"{_PATCHES}:compile_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="`compile` wraps the optimizer, with the loss scale that the model needs",
        link="No hook around compile and the training step",
    ),
    Patch(
        owner="keras:Model",
        name="__setattr__",
        make=f"{_PATCHES}:model_attribute_patch",
        when=(Reason.ENABLED,),
        promise="optimizers in attributes of a model, as those of a GAN, are wrapped",
        link="No hook around compile and the training step",
        is_new=True,
    ),
    Patch(
        owner="keras:Model",
        name="_maybe_symbolic_build",
        make=f"{_FIXES}:symbolic_build_patch",
        when=(Reason.ENABLED,),
        promise="`fit`, `evaluate` and `predict` work on several workers",
        link=_WORKERS,
    ),
    Patch(
        owner="keras.src.backend.tensorflow.trainer",
        name="reduce_per_replica",
        make=f"{_FIXES}:reduce_per_replica_patch",
        when=(Reason.ENABLED,),
        promise="the logs of several workers are averaged",
        link=_WORKERS,
    ),
    # While layers are created, also by a conversion.
    Patch(
        owner="keras:Layer",
        name="__init__",
        make=f"{_PATCHES}:layer_init_patch",
        when=(Reason.ENABLED, Reason.CONVERSION, Reason.IN_USE),
        promise="layers that go wrong in 16 bits stay float32, and normalization is fused",
        link="No hook at the end of a layer's constructor",
    ),
    *(
        Patch(
            owner=f"keras:layers.{layer}",
            name="__init__",
            make=f"{_PATCHES}:layer_init_patch",
            when=(Reason.ENABLED, Reason.CONVERSION),
            promise=f"`{layer}` stays float32 with the arguments that go wrong in 16 bits",
            link="No hook at the end of a layer's constructor",
        )
        for layer in _NEED_THEIR_ARGUMENTS
    ),
    # While something exists that was made with kmp.
    Patch(
        owner="keras:Model",
        name="make_train_function",
        make=f"{_PATCHES}:make_train_function_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="a skipped step leaves the state of the model as it was",
        link="No hook around compile and the training step",
    ),
    Patch(
        owner="keras:Model",
        name="make_test_function",
        make=f"{_PATCHES}:make_test_function_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="metrics of a model that was loaded without `enable` get float32 tensors",
        link="Metrics and added losses in 16 bits",
    ),
    Patch(
        owner="keras:Model",
        name="make_predict_function",
        make=f"{_PATCHES}:make_predict_function_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="`predict` takes few kernels in graph mode on a GPU",
        link="Activations in 16 bits take many kernels in graph mode",
    ),
    Patch(
        owner="keras:Model",
        name="fit",
        make=f"{_PATCHES}:fit_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="callbacks get the keys that kmp's callbacks add to `logs`, in any order",
        link="Callbacks see only the logs of those before them",
    ),
    Patch(
        owner="keras:Metric",
        name="__getattribute__",
        make=f"{_PATCHES}:metric_attribute_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="metrics get 16-bit tensors in float32, whatever code updates them",
        link="Metrics and added losses in 16 bits",
        is_new=True,
    ),
    Patch(
        owner="keras:Layer",
        name="losses",
        make=f"{_PATCHES}:losses_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="losses that layers add in 16 bits are cast to float32",
        link="Metrics and added losses in 16 bits",
    ),
    Patch(
        owner="keras:DTypePolicy",
        name="convert_input",
        make=f"{_INDICES}:convert_input_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="look-up layers get exact indices, which Keras rounds to 16 bits",
        link="Float indices are rounded on their way to a look-up",
    ),
    Patch(
        owner="keras.src.models.functional:Functional",
        name="_convert_inputs_to_tensors",
        make=f"{_INDICES}:functional_inputs_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="a functional model inside of another model passes exact indices on",
        link="Float indices are rounded on their way to a look-up",
    ),
    Patch(
        owner="keras:layers.CategoryEncoding",
        name="__call__",
        make=f"{_INDICES}:category_encoding_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="`CategoryEncoding` gets exact indices in a graph",
        link="Float indices are rounded on their way to a look-up",
        is_new=True,
    ),
    Patch(
        owner="keras:optimizers.Optimizer",
        name="load_own_variables",
        make=f"{_PLAIN_STATE}:load_own_variables_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="the state of a plain optimizer loads into a wrapped one, and back",
        link="Files of a plain optimizer and of a wrapped one",
    ),
    Patch(
        owner="tensorflow.python.checkpoint.restore:CheckpointPosition",
        name="bind_object",
        make="kmp.backend.checkpoint_binding:bind_object_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="a checkpoint of a plain optimizer is read into a wrapped one, and back",
        since="TensorFlow 2.18",
        link="Files of a plain optimizer and of a wrapped one",
    ),
    Patch(
        owner="tensorflow:train.Checkpoint",
        name="__init__",
        make=f"{_PATCHES}:checkpoint_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="`tf.train.Checkpoint(model, optimizer=...)` takes the optimizer of `compile`",
        since="TensorFlow 2.18",
        link="Files of a plain optimizer and of a wrapped one",
    ),
    Patch(
        owner="keras.src.legacy.saving.legacy_h5_format",
        name="save_model_to_hdf5",
        make=f"{_PATCHES}:save_h5_patch",
        when=(Reason.ENABLED, Reason.IN_USE),
        promise="an `.h5` file of a run without a loss scale has the plain optimizer",
        link="Files of a plain optimizer and of a wrapped one",
    ),
    # While code of the user may compute in 16 bits.
    Patch(
        owner="keras:Layer",
        name="__call__",
        make="kmp.layers.layer_calls:layer_call_patch",
        when=(Reason.ENABLED, Reason.IN_USE, Reason.STEP, Reason.REPLAY),
        promise="what the call of a float32 layer creates is float32",
        link="A layer that is created in a call has the global policy",
    ),
    Patch(
        owner="keras:Layer",
        name="_dtype_policy",
        make="kmp.backend.layer_trace:policy_attribute_patch",
        when=(Reason.REPLAY,),
        promise="`kmp.audit` and `kmp.convert` see what custom layers do in 16 bits",
        link=_NEEDED_BY_REPLAY,
        is_new=True,
    ),
    Patch(
        owner="tensorflow.python.framework.ops",
        name="_create_graph_constant",
        make="kmp.backend.step_graph:constant_patch",
        when=(Reason.STEP, Reason.REPLAY),
        promise="a pass in float32 has the exact values of constants that the step has in 16 bits",
        since="TensorFlow 2.18",
        link=_NEEDED_BY_REPLAY,
    ),
    *(
        Patch(
            owner=owner,
            name=name,
            make=f"{_PROMOTION}:{make}",
            when=(Reason.ENABLED, Reason.IN_USE, Reason.STEP, Reason.REPLAY, Reason.CONVERSION),
            promise="16-bit tensors meet float32 ones in code of the user, and float32 results",
            since="TensorFlow 2.18",
            link="Operands of two float dtypes raise an error",
            is_new=name == "__new__",
        )
        for owner, name, make in (
            (
                "tensorflow.python.eager.core:_NotOkStatusException",
                "__new__",
                "not_ok_status_patch",
            ),
            (
                "tensorflow.python.eager.execute",
                "args_to_matching_eager",
                "matching_arguments_patch",
            ),
            (
                "tensorflow.python.framework.op_def_library",
                "_apply_op_helper",
                "add_operation_patch",
            ),
            ("tensorflow.python.util.dispatch", "dispatch", "dispatch_patch"),
        )
    ),
    *(
        Patch(
            owner="keras.src.backend.tensorflow.nn",
            name=name,
            make=f"{_COMPILED}:{make}",
            when=(Reason.ENABLED, Reason.IN_USE),
            promise="activations in 16 bits are few kernels in graph mode on a GPU",
            link="Activations in 16 bits take many kernels in graph mode",
        )
        for name, make in (
            ("gelu", "function_patch"),
            ("hard_sigmoid", "function_patch"),
            ("hard_silu", "function_patch"),
            ("silu", "function_patch"),
            ("softmax", "softmax_patch"),
            ("_dot_product_attention_xla", "attention_patch"),
        )
    ),
    # While a guarded step is traced or runs eagerly.
    Patch(
        owner="keras:Variable",
        name="assign",
        make="kmp.guarding.assignments:assign_patch",
        when=(Reason.STEP,),
        promise="a skipped step restores weights that other code than the optimizer assigns",
        link="No hook around compile and the training step",
    ),
    # While a batch is replayed.
    Patch(
        owner="tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",
        name="_run_functions_eagerly",
        make=f"{_INTERNALS}:run_eagerly_patch",
        when=(Reason.REPLAY,),
        promise="a trace for a replay leaves no trace of the user's `tf.function`s",
        since="TensorFlow 2.18",
        link=_NEEDED_BY_REPLAY,
    ),
)


@dataclass(frozen=True)
class PrivateName:
    """A private name of Keras or TensorFlow that kmp reads or calls.

    Args:
        where: The function, as `"module:name"`, or the attribute, as `"module:Class.name"`.
        promise: What the user may lose without it.
        without: What kmp does then.
    """

    where: str
    promise: str
    without: str


PRIVATE_NAMES = (
    # Layers and models.
    PrivateName(
        "keras:Layer._flatten_layers",
        "kmp finds all layers inside of wrappers, custom layers and lists",
        "searches the attributes of each layer",
    ),
    PrivateName(
        "keras:Layer._trainable_variables",
        "a skipped step copies only the weights that may change",
        "takes the variables of a layer that are in none of its sublayers",
    ),
    PrivateName(
        "keras:Layer._non_trainable_variables",
        "a skipped step restores the state of frozen layers",
        "takes the variables of a layer that are in none of its sublayers",
    ),
    PrivateName(
        "keras:Layer._outbound_nodes",
        "`kmp.convert` knows which layer takes the outputs of another",
        "takes no layer for the only consumer of another",
    ),
    PrivateName(
        "keras:Operation._inbound_nodes",
        "`kmp.convert`, `kmp.audit` and a log follow each call of a layer in a graph",
        "raises an error in the first two, and the log does not say which layers follow each layer",
    ),
    PrivateName(
        "keras:KerasTensor._keras_history",
        "`kmp.convert`, `kmp.audit` and a log follow the graph of a functional model, and `compile`"
        " warns about its outputs in float16",
        "raises an error in the first two, the log does not say which layers follow each layer, and"
        " `compile` does not warn",
    ),
    PrivateName(
        "keras:Model._run_through_graph",
        "`kmp.convert` rebuilds a functional model",
        "raises an error in `kmp.convert`",
    ),
    PrivateName(
        "keras:Model._autoconvert_optionals",
        "batches of skipped steps are replayed, and a failing one is saved",
        "keeps no batch of `fit`",
    ),
    PrivateName(
        "keras:Model._compile_metrics",
        "the first step of `fit` is traced once",
        "lets Keras create metrics in the first trace",
    ),
    PrivateName(
        "keras:Model._symbolic_build",
        "the first step of `fit` is traced once",
        "lets Keras create metrics in the first trace",
    ),
    PrivateName(
        "keras:Model._compile_config",
        "`kmp.convert` compiles the new model with the metrics of the old one",
        "compiles it with what has public names",
    ),
    PrivateName(
        "keras:Model._distribute_strategy",
        "`kmp.audit` knows that a strategy keeps Keras from compiling with XLA",
        "takes a model for one without a strategy",
    ),
    PrivateName(
        "tensorflow.python.eager.context:context",
        "a pass in float32 of a step with branches and loops",
        "does not pass a step in float32 that has functions",
    ),
    # Variables and optimizers.
    PrivateName(
        "keras:Variable._value",
        "a skipped step restores a weight that was assigned while Keras casts it to 16 bits",
        "reads the cast value",
    ),
    PrivateName(
        "keras:optimizers.Optimizer._learning_rate",
        "kmp knows a learning rate schedule from a constant",
        "takes the learning rate for a constant",
    ),
    PrivateName(
        "keras:optimizers.Optimizer._clip_gradients",
        "each of several replicas clips its gradients in compiled code",
        "raises an error if `clipnorm`, `global_clipnorm` or `clipvalue` is set",
    ),
    PrivateName(
        "keras:optimizers.Optimizer._trainable_variables",
        "kmp tells the state of an optimizer from the weights that it trains",
        "takes all variables for state",
    ),
    PrivateName(
        "keras.src.utils.tracking:no_automatic_dependency_tracking",
        "files of kmp's optimizer have the same variables as those of Keras'",
        "lets Keras track variables in plain attributes",
    ),
    # Scopes and contexts.
    PrivateName(
        "keras.src.backend.common.symbolic_scope:in_symbolic_scope",
        "a look-up layer warns about indices in 16 bits",
        "does not warn",
    ),
    PrivateName(
        "keras.src.backend.common.variables:AutocastScope",
        "metrics and kernels that a layer updates are computed in float32",
        "lets Keras cast them to the layer's compute dtype",
    ),
    PrivateName(
        "keras.src.backend.tensorflow.numpy",
        "the compiled update of an embedding reads the rows of its gradient, and waits for no host",
        "lets Keras search all rows of a divisor for NaN",
    ),
    PrivateName(
        "keras.src.backend.common.stateless_scope:in_stateless_scope",
        "a step without an overflow does not write what only a skipped step needs",
        "writes the old values without a branch",
    ),
    PrivateName(
        "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
        "kmp needs few kernels under XLA",
        "computes under XLA as in a graph",
    ),
    PrivateName(
        "tensorflow.compiler.tf2xla.python.xla:optimization_barrier",
        "kmp needs few kernels under XLA",
        "lets XLA fuse as it does",
    ),
    PrivateName(
        "tensorflow.python.eager.forwardprop_util:pack_tangents",
        "second derivatives of compiled parts move few bytes",
        "lets a persistent tape keep what a part computes on the way",
    ),
    PrivateName(
        "tensorflow.python.framework.ops:gradient_registry._registry",
        "the graph of a training step is freed",
        "lets TensorFlow keep the graph",
    ),
    PrivateName(
        "tensorflow.python.eager.polymorphic_function.compiler_ir:from_concrete_function",
        "under a strategy, a step that XLA cannot compile runs as a graph",
        "lets such a step fail, as Keras does without a strategy",
    ),
    PrivateName(
        "tensorflow:__internal__.distribute.strategy_supports_no_merge_call",
        "a strategy with one GPU works under XLA",
        "updates variables in the replica context",
    ),
    PrivateName(
        "tensorflow.python.distribute.distribute_lib:_push_per_thread_mode",
        "XLA compiles the step of each replica",
        "updates all replicas together",
    ),
    PrivateName(
        "tensorflow.python.distribute.distribute_lib:_pop_per_thread_mode",
        "XLA compiles the step of each replica",
        "updates all replicas together",
    ),
    PrivateName(
        "tensorflow.python.distribute.distribute_lib:_get_default_replica_mode",
        "XLA compiles the step of each replica",
        "updates all replicas together",
    ),
    PrivateName(
        "tensorflow.python.framework.config:is_op_determinism_enabled",
        "statistics are deterministic if operations have to be",
        "takes operations for not deterministic",
    ),
    PrivateName(
        "tensorflow.python.util.tf_stack:extract_stack",
        "the log names the line of the user's code whose operands are promoted",
        "says that the line is not known",
    ),
    PrivateName(
        "tensorflow.python.util._pywrap_util_port:IsMklEnabled",
        "`graph_rewrite` warns if oneDNN is off",
        "does not warn",
    ),
    PrivateName(
        "tensorflow.python.eager.context:context",
        "`kmp_bench.compare` does not change which random numbers a program draws",
        "restores the random numbers of Python, NumPy and Keras only",
    ),
    PrivateName(
        "keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER",
        "`kmp_bench.compare` does not change the seeds and the names of later layers",
        "restores the random numbers of Python, NumPy and TensorFlow only",
    ),
    *(
        PrivateName(
            where,
            "counts of bytes have the transpositions that TensorFlow adds on a GPU",
            "counts those of its kernels only",
        )
        for where in (
            "tensorflow.python.grappler.tf_optimizer:OptimizeGraph",
            "tensorflow.python.grappler.cluster:Cluster",
            "tensorflow.core.protobuf.device_properties_pb2:NamedDevice",
        )
    ),
    # Replays.
    PrivateName(
        "tensorflow:types.experimental.PolymorphicFunction._function_cache",
        "a repair has the user's `tf.function`s traced again",
        "repairs no custom training loop",
    ),
    PrivateName(
        "tensorflow.core.function.polymorphism.function_cache:FunctionCache._primary",
        "a `tf.function` that cannot be traced again after a repair runs as before",
        "has it traced again, whatever follows",
    ),
    PrivateName(
        "tensorflow:Tensor._handle_data",
        "a replay restores variables of TensorFlow that a training step uses",
        "does not replay batches",
    ),
    PrivateName(
        "tensorflow:Graph._get_function",
        "a replay knows what a training step changes that nobody can restore",
        "does not replay batches",
    ),
)
