"""What OpenTelemetry's own tools load of us, by entry points; a training process has it only where they run in it."""
