"""What other packages add to vexport through entry points, found without importing them.

A package names its objects in its own pyproject.toml:

    [project.entry-points."vexport.observers"]
    my_observer = "my_package.observers:MyObserver"
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from vexport.errors import EnvironmentFault

OBSERVERS = "vexport.observers"
CALIBRATION = "vexport.calibration"
ROUNDINGS = "vexport.roundings"


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; of several with one name the first that is found."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, point)
    return found


def load_plugin(group: str, name: str) -> object:
    """The object of an entry point. Raises EnvironmentFault where its package cannot be imported."""
    point = plugins(group)[name]
    try:
        return point.load()
    except Exception as error:
        raise EnvironmentFault(
            f"{group} {name}",
            got=f"{type(error).__name__}: {error} from {point.value}",
            need="an entry point that can be imported",
            fix=f"repair or remove the package {package_of(point)}",
        ) from error


def package_of(point: EntryPoint) -> str:
    """The distribution that an entry point comes from."""
    return point.dist.name if point.dist else "that brings it"
