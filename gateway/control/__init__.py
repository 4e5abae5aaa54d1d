"""What the gateway knows and how it stays current: engines polled, policy watched, presence renewed."""
