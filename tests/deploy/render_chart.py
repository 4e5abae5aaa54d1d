"""Lint and render the Helm chart at argv[1] with the values on stdin (JSON); print {template: manifest} as JSON.

Run by the Python of .venv/deploy, which has Helm's own code as a library. Exit code 1 and Helm's words where it refuses.
"""

import json
import sys

import helm_python as helm

values = json.load(sys.stdin)
try:
    report = helm.lint(sys.argv[1], values, strict=True, kube_version="v1.35.0")
    found = [f"{one['path']}: {one['error']}" for one in report["messages"] if one["severity"] > 1]
    if found:
        sys.exit("\n".join(found))
    chart = helm.Chart.load(sys.argv[1])
    chart.validate_schema(values)
    rendered = chart.render(values, name="llm", namespace="serving")
except helm.HelmError as error:
    sys.exit(str(error))
json.dump(rendered, sys.stdout)
