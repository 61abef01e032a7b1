"""Films a command: writes the text of its terminal at given moments to a file.

    python tools/film.py docs/demo.txt 100x22 5,30,60 -- hdet demo

The arguments are the file, the size of the terminal, the moments in seconds, and the command. The
last picture is the screen at the end. Needs `pip install pyte`.
"""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from pathlib import Path

import pyte


def film(command: list[str], columns: int, rows: int, moments: list[float]) -> list[str]:
    """The screen of the command at each moment, in seconds, and at the end."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(rows))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    start, waiting, pictures = time.monotonic(), sorted(moments), []
    while True:
        if not select.select([terminal], [], [], 0.02)[0]:  # quiet: the screen is complete
            if waiting and time.monotonic() - start > waiting[0]:
                pictures.append(f"--- after {waiting.pop(0):.0f} seconds\n{picture(screen)}")
            continue
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the command has ended
            break
    os.waitpid(child, 0)
    return [*pictures, f"--- at the end\n{picture(screen)}"]


def picture(screen: pyte.Screen) -> str:
    """The text on the screen, without the blanks around it."""
    return "\n".join(line.rstrip() for line in screen.display).strip("\n")


def main() -> None:
    out, size, moments, _, *command = sys.argv[1:]
    columns, rows = (int(part) for part in size.split("x"))
    taken = film(command, columns, rows, [float(moment) for moment in moments.split(",")])
    title = "$ " + " ".join(command)
    Path(out).write_text("\n\n".join([title, *taken]) + "\n")


if __name__ == "__main__":
    main()
