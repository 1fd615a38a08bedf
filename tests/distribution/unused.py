"""Hides packages that Keras and KerasHub import where they are installed.

For processes that use none of them, where they are half of the time that
imports take. To be imported first.
"""

import sys

for name in ("matplotlib", "pandas", "sklearn", "tensorflow"):
    sys.modules[name] = None
