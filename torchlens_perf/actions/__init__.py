"""Actions after verdicts: nodes are reported to schedulers and people, repeat offenders are found over many
runs, and agents can ask. All of it is off until it is asked for, and runs outside of the job. Start in
act.py.
"""
