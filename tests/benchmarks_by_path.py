"""Makes the benchmarks importable, which are not installed.

By their path: with the root on sys.path, the source folder would hide the installed pearl_jax.
"""

import sys
import types
from pathlib import Path

package = types.ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).parents[1] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)
