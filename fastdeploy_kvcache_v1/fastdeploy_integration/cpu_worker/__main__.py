"""`python -m fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker FLAGS`: what `serve --fastdeploy-cpu` becomes."""

import sys

from ...errors import KVCacheError
from ...extras import needed_by
from .settings import parse
from .supervisor import supervise


def main() -> int:
    try:
        with needed_by("serve --fastdeploy-cpu", "embedded"):
            return supervise(parse(sys.argv[1:]))
    except KVCacheError as error:
        print(f"fastdeploy-kvcache: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
