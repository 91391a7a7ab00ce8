"""`python -m thinwire`: the command line."""

import sys

from thinwire.node.cli.main import main

sys.exit(main(sys.argv[1:]))
