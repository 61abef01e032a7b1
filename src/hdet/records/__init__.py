"""What happened in a run, as files: events, sinks, the reader, exported schedules, replay."""
