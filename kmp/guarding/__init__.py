"""`guard`: a skipped step changes no layer, and a batch with a non-finite loss no metric."""

from kmp.guarding.assignments import assign_patch as assign_patch
from kmp.guarding.custom_loop import guard
from kmp.guarding.guarded_step import guard_train_step as guard_train_step
from kmp.guarding.guarded_step import guarded_step_of as guarded_step_of
from kmp.guarding.guarded_step import has_keras_step as has_keras_step
from kmp.guarding.guarded_step import is_built as is_built
from kmp.guarding.model_optimizers import all_optimizers_of as all_optimizers_of
from kmp.guarding.model_optimizers import optimizers_of as optimizers_of

__all__ = ["guard"]
