"""What to do when the broker of answers, such as Home Assistant's, refuses the login."""

from ...wire.login import LoginAdvice

ANSWERS_ADVICE = LoginAdvice(
    "name a user of this broker with --mqtt-user, and the file of the password with --mqtt-password-file (mqtt_user "
    "and mqtt_password_file under [serve])",
    "give the user and the password that this broker knows (--mqtt-user, --mqtt-password-file; mqtt_user and "
    "mqtt_password_file under [serve])",
)
