"""Pipeline schedules to look at, as they should run or as they did: what `colonnade schedule` prints and draws.

Where to begin reading: words.py for what is said about a schedule, svg.py for the drawing, trace.py for what was measured.
"""
