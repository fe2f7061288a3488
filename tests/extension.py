"""What is skipped where Winnow was built without a compiler."""

import pytest

from winnow.native import is_installed

needs_extension = pytest.mark.skipif(not is_installed(), reason="built without a compiler")
