"""Programs with a planted fault, and healthy ones, as users write them.

Each is a function that returns a score. A function gets a random generator, and returns an
accuracy, or an error with a minus sign. Its source is edited as a finding says, so what may have to
change stands in it. `frame` has what several of them use.
"""

import importlib
import pkgutil

PROGRAMS = {
    name: function
    for module in pkgutil.iter_modules(__path__)
    for name, function in vars(importlib.import_module(f"programs.{module.name}")).items()
    if name.startswith(("fault_", "healthy_"))
}
