"""Programs with a planted fault, and healthy ones, as users write them.

Each is a function of a random generator and of the callbacks for `fit`. It trains a small model and
returns a score: an accuracy, the explained share of a variance, or an error with a minus sign. A
change is made in its source, so what may have to change stands in it; `frame` has what several
programs share.

The name says the rest: `fault_CATEGORY_SUBJECT` trains in float16, `fault_bfloat16_SUBJECT` in
bfloat16 and `fault_float32_SUBJECT` in float32; `healthy_...` has no fault.
"""

import importlib
import pkgutil

PROGRAMS = {
    name: function
    for module in pkgutil.iter_modules(__path__)
    for name, function in vars(importlib.import_module(f"{__name__}.{module.name}")).items()
    if name.startswith(("fault_", "healthy_"))
}
