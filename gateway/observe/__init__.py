"""What the gateway's numbers are shown with: the metrics page of the documents, dashboards, rules and alerts."""
